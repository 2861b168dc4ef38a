"""Loading and exporting on real ranks: tensor parallel, pipeline parallel, both."""

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file

from accel.backends.cpu import CpuAccelerator
from tests.train.model_cases import load, save_tiny, tiny_config
from train.config.run import RunConfig

LAYOUTS = {"tensor 2": (2, 1), "tensor 2 x pipeline 2": (2, 2)}
MODELS = (("llama", False), ("qwen2", True), ("qwen3", False), ("qwen3", True))


def one_of_many(rank: int, tensor: int, pipeline: int, base: Path) -> None:
    from train.megatron.bootstrap import prepare_megatron
    from train.megatron.parallel import join_ranks, leave_ranks
    from train.megatron.weights.exporting import save_hf
    from train.megatron.weights.loading import load_hf_weights

    torch.set_num_threads(1)
    accelerator = CpuAccelerator()
    prepare_megatron(accelerator)
    config = RunConfig.model_validate(
        {"parallel": {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}}
    )
    join_ranks(config, accelerator, rank=rank, world_size=tensor * pipeline, store_path=str(base / "store"))
    try:
        for model_type, tied in MODELS:
            source = base / f"{model_type}-{tied}"
            expected = load_file(source / "model.safetensors")
            loaded = load(source, config)
            assert_same(loaded.tensors(), expected)
            report = load_hf_weights(loaded.model, loaded.family, loaded.hf_config, source)
            assert report.bytes_read < 4 * sum(tensor.numel() for tensor in expected.values())
            save_hf(loaded.model, loaded.family, loaded.hf_config, base / f"{source.name}-out", source)
            assert_same(load_file(base / f"{source.name}-out" / "model.safetensors"), expected)
            if pipeline == 1:
                compare_logits(loaded.model, rank, tensor, base / f"{source.name}-logits.pt")
    finally:
        leave_ranks()


def assert_same(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name]), name


def compare_logits(model: torch.nn.Module, rank: int, ranks: int, file: Path) -> None:
    """This rank's columns; those beyond the vocabulary, which the reference does not have, never win."""
    tokens, reference = torch.load(file)
    with torch.no_grad():
        logits = model(tokens, None, None)
    expected = torch.nn.functional.pad(reference, (0, logits.shape[-1] * ranks - reference.shape[-1]), value=-3e4)
    torch.testing.assert_close(logits, expected.chunk(ranks, dim=-1)[rank], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_load_their_slices_and_export_the_whole(tmp_path, layout):
    tensor, pipeline = LAYOUTS[layout]
    for model_type, tied in MODELS:
        model = save_tiny(tmp_path / f"{model_type}-{tied}", model_type, tied)
        tokens = torch.randint(0, tiny_config(model_type).vocab_size, (2, 9))
        with torch.no_grad():
            torch.save((tokens, model(tokens).logits), tmp_path / f"{model_type}-{tied}-logits.pt")
    mp.spawn(one_of_many, (tensor, pipeline, tmp_path), nprocs=tensor * pipeline)
