"""MXFP4 expert blocks: read as transformers reads them, each rank its own experts only."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from samples.errors import InputError
from tests.train.model_cases import load, save_tiny
from train.exporting import Export, export_model
from train.megatron.weights import mxfp4

EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"


def packed(shape: tuple[int, ...], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random blocks and scales of a tensor of this shape."""
    generator = torch.Generator().manual_seed(seed)
    blocks, scales = mxfp4.stored_shapes(shape)
    return (
        torch.randint(0, 256, blocks, generator=generator, dtype=torch.uint8),
        torch.randint(120, 130, scales, generator=generator, dtype=torch.uint8),
    )


def test_values_equal_transformers():
    blocks, scales = packed((3, 64, 10))
    assert torch.equal(
        mxfp4.dequantise(blocks, scales), convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    )


@pytest.fixture
def quantised(tmp_path):
    """A model directory whose expert matrices are MXFP4, and the matrices that they stand for."""
    save_tiny(tmp_path, "gpt_oss", intermediate_size=32)
    file = tmp_path / "model.safetensors"
    tensors, meant = load_file(file), {}
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks, scales = packed(tuple(tensors.pop(name).shape), seed=len(meant))
        tensors |= {name + mxfp4.BLOCKS: blocks, name + mxfp4.SCALES: scales}
        meant[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path, meant


def test_a_quantised_model_loads_and_is_exported_unquantised(one_rank, quantised, tmp_path):
    directory, meant = quantised
    ours = load(directory).tensors()
    for name, tensor in meant.items():
        assert torch.equal(ours[name], tensor), name
    export_model(Export(directory, tmp_path / "out"))
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    again = load(tmp_path / "out").tensors()
    assert all(torch.equal(again[name], tensor) for name, tensor in ours.items())


def test_scales_that_do_not_fit_are_named(one_rank, quantised):
    directory, _ = quantised
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors[EXPERTS + mxfp4.SCALES] = tensors[EXPERTS + mxfp4.SCALES][:, 1:].contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"gate_up_proj_scales in .* has shape"):
        load(directory)
    tensors.pop(EXPERTS + mxfp4.SCALES)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"not there: model\.layers\.0\.mlp\.experts\.gate_up_proj"):
        load(directory)


def test_a_width_that_is_no_number_of_groups_is_refused(tmp_path):
    save_tiny(tmp_path, "gpt_oss", intermediate_size=48)
    tensors = load_file(tmp_path / "model.safetensors")
    name = EXPERTS.replace("gate_up", "down")
    blocks, scales = packed(tuple(tensors.pop(name).shape))
    save_file(
        tensors | {name + mxfp4.BLOCKS: blocks, name + mxfp4.SCALES: scales},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    with pytest.raises(InputError, match="a multiple of 32"):
        export_model(Export(tmp_path, tmp_path / "out"))
    assert not (tmp_path / "out").exists()
