"""``python -m train inspect``: sizes are transformers' own, layouts and tables are those that are built."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.train.model_cases import KINDS, save_tiny, saved_buffers, tiny_config
from train.config.sections import ParallelConfig
from train.main import main
from train.megatron.model_size import active_parameters, parameters_by_part, rank_memory
from train.megatron.models import FAMILIES


def family_of_kind(kind: str):
    return FAMILIES[tiny_config(kind).model_type]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_parameter_counts_equal_transformers(kind, tied):
    config = tiny_config(kind, tied)
    with torch.device("meta"):
        reference = KINDS[kind][1](config)
    parts = parameters_by_part(family_of_kind(kind), config)
    buffers = parts.pop("saved buffers (not trained)", 0)
    assert sum(parts.values()) == sum(parameter.numel() for parameter in reference.parameters())
    assert buffers == sum(buffer.numel() for buffer in saved_buffers(reference).values())


def test_a_token_goes_through_the_experts_that_it_is_routed_to():
    config = tiny_config("qwen3_moe")
    parts = parameters_by_part(FAMILIES["qwen3_moe"], config)
    assert sum(parts.values()) - active_parameters(FAMILIES["qwen3_moe"], config) == parts["experts"] // 2
    dense = tiny_config("llama")
    assert active_parameters(FAMILIES["llama"], dense) == sum(parameters_by_part(FAMILIES["llama"], dense).values())


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "glm4"])
def test_weights_of_a_rank_are_what_is_built_there(one_rank, tmp_path, kind):
    from tests.train.model_cases import load

    save_tiny(tmp_path, kind)
    built = sum(parameter.numel() for parameter in load(tmp_path).model.parameters())
    config = tiny_config(kind)
    memory = rank_memory(family_of_kind(kind), config, ParallelConfig(), data_parallel_size=2, bf16=False)
    assert (memory.weights, memory.gradients, memory.optimizer) == (4 * built, 4 * built, 8 * built // 2)


def test_ranks_share_what_can_be_shared():
    family, config = FAMILIES["qwen3_moe"], tiny_config("qwen3_moe")
    whole = rank_memory(family, config, ParallelConfig(), data_parallel_size=2, bf16=True)
    layout = ParallelConfig(expert_model_parallel_size=2)
    shared = rank_memory(family, config, layout, data_parallel_size=2, bf16=True)
    experts = parameters_by_part(family, config)["experts"]
    assert whole.weights - shared.weights == 2 * experts // 2
    assert whole.optimizer == shared.optimizer  # whole experts halve theirs over the replicas instead


@pytest.mark.parametrize("kind", KINDS)
def test_it_prints_family_layouts_memory_and_table(tmp_path, capsys, kind):
    save_tiny(tmp_path, kind)
    assert main(["inspect", str(tmp_path), "--pipeline-model-parallel-size", "2", "--bf16"]) == 0
    printed = capsys.readouterr().out
    for words in (
        kind.partition("/")[0],
        "total trained",
        "--tensor-model-parallel-size     1, 2",
        "pipeline 2",
        "<- model.embed_tokens.weight",
        "every tensor of the table is there",
    ):
        assert words in printed
    assert ("that a token goes through" in printed) == (family_of_kind(kind).experts(tiny_config(kind)) > 0)


def test_what_cannot_be_used_is_said(tmp_path, capsys):
    save_tiny(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert main(["inspect", str(tmp_path)]) == 1
    assert "model.norm.weight" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path), "--tensor-model-parallel-size", "3"]) == 2
    assert "--tensor-model-parallel-size 3 does not divide" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"model_type": "mistral"}')
    assert main(["inspect", str(tmp_path)]) == 2
    assert "Supported: deepseek_v3" in capsys.readouterr().err
