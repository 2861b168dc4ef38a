"""Writing Hugging Face directories that transformers loads."""

import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from samples.errors import InputError
from samples.model_files import load_config
from tests.train.model_cases import EVERY_MODEL, load, save_tiny
from train.config.run import RunConfig
from train.config.sections import ModelConfig
from train.megatron.weights.directory import all_finite, check_target
from train.megatron.weights.saving import save_hf

pytestmark = pytest.mark.usefixtures("one_rank")


def save(loaded, directory, source, **options):
    save_hf(loaded.model, loaded.family, loaded.hf_config, directory, source, **options)


@pytest.mark.parametrize(("model_type", "tied"), EVERY_MODEL)
def test_saved_directory_loads_in_transformers_bit_equal(tmp_path, model_type, tied):
    reference = save_tiny(tmp_path / "in", model_type, tied)
    save(load(tmp_path / "in"), tmp_path / "out", tmp_path / "in")
    config = load_config(tmp_path / "out")  # transformers has kimi_k2 under another name
    again, notes = AutoModelForCausalLM.from_pretrained(tmp_path / "out", config=config, output_loading_info=True)
    assert not any(notes.values())
    assert again.dtype == torch.float32
    expected = dict(reference.named_parameters())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.named_parameters())


def test_large_models_are_cut_into_shards_with_an_index(tmp_path):
    reference = save_tiny(tmp_path / "in", "qwen3")
    save(load(tmp_path / "in"), tmp_path / "out", tmp_path / "in", shard_bytes=20_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert index["metadata"]["total_size"] == 4 * sum(parameter.numel() for parameter in reference.parameters())
    held = {}
    for file in files:
        with safe_open(tmp_path / "out" / file, framework="pt") as opened:
            held |= dict.fromkeys(opened.keys(), file)
    assert held == index["weight_map"]
    assert load(tmp_path / "out").tensors().keys() == load(tmp_path / "in").tensors().keys()


def test_config_and_tokenizer_are_carried_over_with_the_dtype_of_the_weights(tmp_path):
    save_tiny(tmp_path / "in", "llama")
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    (tmp_path / "in" / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32", "note": "ours"}))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "README.md", "optimizer.pt"):
        (tmp_path / "in" / name).write_text(name)
    save(load(tmp_path / "in", RunConfig(model=ModelConfig(bf16=True))), tmp_path / "out", tmp_path / "in")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == config | {"torch_dtype": "bfloat16", "dtype": "bfloat16", "note": "ours"}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip


def test_without_a_source_the_config_is_the_models_own(tmp_path):
    save_tiny(tmp_path / "in", "qwen2")
    loaded = load(tmp_path / "in")
    save(loaded, tmp_path / "deep" / "out", None)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "deep" / "out").config.vocab_size == 67


def test_a_target_that_holds_something_is_refused_before_and_kept_after(tmp_path):
    save_tiny(tmp_path / "in", "qwen2")
    out = tmp_path / "out"
    out.mkdir()
    check_target(out)
    (out / "mine").write_text("keep")
    with pytest.raises(InputError, match=r"--save-hf .*out: it exists"):
        check_target(out)
    with pytest.raises(InputError, match=r"cannot be replaced.*the model is in") as refusal:
        save(load(tmp_path / "in"), out, tmp_path / "in")
    assert (out / "mine").read_text() == "keep"
    elsewhere = str(refusal.value).split()[-1]
    assert AutoModelForCausalLM.from_pretrained(elsewhere).config.model_type == "qwen2"
    (out / "mine").unlink()
    save(load(tmp_path / "in"), out, tmp_path / "in")
    assert (out / "model.safetensors").exists()


def test_nothing_is_left_behind_when_writing_fails(tmp_path):
    save_tiny(tmp_path / "in", "qwen2")
    loaded = load(tmp_path / "in")
    with pytest.raises(FileNotFoundError):
        save(loaded, tmp_path / "out", tmp_path / "no-such-source")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_weights_that_are_no_numbers_are_written_and_named(tmp_path, capsys):
    save_tiny(tmp_path / "in", "qwen3")
    loaded = load(tmp_path / "in")
    with torch.no_grad():
        loaded.model.decoder.layers[1].mlp.linear_fc2.weight[0, 0] = float("nan")
    save(loaded, tmp_path / "out", tmp_path / "in")
    assert "model.layers.1.mlp.down_proj.weight has values that are no numbers" in capsys.readouterr().err
    save(load(tmp_path / "in"), tmp_path / "whole", tmp_path / "in")
    assert capsys.readouterr().err.count("accelrl:") == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("values", [[float("inf"), float("-inf")], [float("nan"), 1.0], [2.0, float("-inf")]])
def test_every_value_that_is_no_number_is_seen_and_a_sum_that_overflows_is_none(dtype, values):
    assert not all_finite(torch.tensor(values, dtype=dtype))
    assert all_finite(torch.full((3, 5), torch.finfo(dtype).max, dtype=dtype))
    assert all_finite(torch.tensor([-0.0, 1e-40], dtype=dtype))
