"""FP8 blocks: values within the format's bound, zeros exact, parts equal to the whole's, and export and reload."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from samples.errors import InputError
from tests.train.model_cases import load, save_tiny
from train.exporting import Export, export_model
from train.megatron.weights import fp8_blocks

sizes = st.integers(1, 9)


def a_weight(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def bound(weight: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Half a unit in the last of three bits of each value, and half the smallest step of its block."""
    scales = fp8_blocks.quantise(weight, block)[1]
    rows, columns = (torch.arange(n) // b for n, b in zip(weight.shape, block, strict=True))
    return weight.abs() * 2**-4 + scales[rows][:, columns] * 2**-10


@given(sizes, sizes, sizes, sizes, st.integers(0, 3))
def test_values_come_back_within_the_bound(rows, columns, down, across, seed):
    weight, block = a_weight(rows, columns, seed), (down, across)
    narrow, scales = fp8_blocks.quantise(weight, block)
    assert narrow.shape == weight.shape
    assert scales.shape == fp8_blocks.scale_shape((rows, columns), block)
    back = fp8_blocks.dequantise(narrow, scales, block)
    assert ((back - weight).abs() <= bound(weight, block) * 1.001).all()


@given(sizes, sizes, st.data())
def test_a_part_is_the_part_of_the_whole(rows, columns, data):
    narrow, scales = fp8_blocks.quantise(a_weight(rows, columns), (3, 2))
    whole = fp8_blocks.dequantise(narrow, scales, (3, 2))
    row = data.draw(st.integers(0, rows - 1))
    column = data.draw(st.integers(0, columns - 1))
    part = fp8_blocks.dequantise(narrow[row:, column:], scales, (3, 2), row=row, column=column)
    assert torch.equal(part, whole[row:, column:])


@pytest.mark.parametrize("scale", [1.0, 0.0, float("inf"), float("nan")])
def test_a_block_of_zeros_gives_zeros_whatever_its_scale(scale):
    """slime 2256: such a block is written with a scale of 1, and read as zeros whatever another writer gave it."""
    narrow = torch.zeros(4, 4).to(torch.float8_e4m3fn)
    assert torch.equal(fp8_blocks.dequantise(narrow, torch.full((2, 2), scale), (2, 2)), torch.zeros(4, 4))
    assert fp8_blocks.quantise(torch.zeros(4, 4), (2, 2))[1].tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_a_missing_format_means_e4m3_and_other_ways_are_refused():
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert fp8_blocks.block_size(config, "x") == (128, 128)
    for wrong in ({"quant_method": "gptq"}, {"quant_method": "fp8"}, config | {"fmt": "e5m2"}):
        with pytest.raises(InputError, match="x: "):
            fp8_blocks.block_size(wrong, "x")


@pytest.mark.parametrize("kind", ["qwen3", "deepseek_v3"])
def test_export_in_fp8_loads_again_within_the_bound(one_rank, tmp_path, kind):
    save_tiny(tmp_path / "wide", kind, hidden_size=136, intermediate_size=144)  # blocks at the edges
    whole = load(tmp_path / "wide").tensors()
    zeroed = "model.layers.0.self_attn.o_proj.weight"
    tensors = load_file(tmp_path / "wide" / "model.safetensors")
    tensors[zeroed].zero_()
    save_file(tensors, tmp_path / "wide" / "model.safetensors", metadata={"format": "pt"})
    export_model(Export(tmp_path / "wide", tmp_path / "narrow", fp8_blocks=True))

    stored = load_file(tmp_path / "narrow" / "model.safetensors")
    config = json.loads((tmp_path / "narrow" / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    assert stored["model.embed_tokens.weight"].dtype == torch.float32
    narrow = {name for name, tensor in stored.items() if tensor.dtype == torch.float8_e4m3fn}
    assert {name + "_scale_inv" for name in narrow} <= stored.keys()
    assert zeroed in narrow
    back = load(tmp_path / "narrow").tensors()
    assert back.keys() == whole.keys()
    for name, tensor in back.items():
        if name == zeroed:
            assert not tensor.any()
        elif name in narrow:
            assert ((tensor - whole[name]).abs() <= bound(whole[name], (128, 128)) * 1.001).all(), name
        else:
            assert torch.equal(tensor, whole[name]), name
    # What was read is exact: written unquantised and read again, it is the same.
    export_model(Export(tmp_path / "narrow", tmp_path / "again", dtype=torch.float32))
    assert "quantization_config" not in json.loads((tmp_path / "again" / "config.json").read_text())
    for name, tensor in load(tmp_path / "again").tensors().items():
        assert torch.equal(tensor, back[name]), name


def test_missing_and_misshapen_scales_are_named(one_rank, tmp_path):
    save_tiny(tmp_path / "wide", "qwen3")
    export_model(Export(tmp_path / "wide", tmp_path / "narrow", fp8_blocks=True))
    file = tmp_path / "narrow" / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    for change, words in (
        (lambda t: t.pop(name + "_scale_inv"), "stored as FP8 and there are no scales"),
        (lambda t: t.update({name + "_scale_inv": torch.ones(2, 2)}), r"has shape \[2, 2\]"),
    ):
        broken = dict(tensors)
        change(broken)
        save_file(broken, file, metadata={"format": "pt"})
        with pytest.raises(InputError, match=words) as caught:
            load(tmp_path / "narrow")
        assert name in str(caught.value)


def test_fp8_weights_that_the_config_does_not_tell_of_are_refused(tmp_path):
    save_tiny(tmp_path / "plain", "qwen3")
    export_model(Export(tmp_path / "plain", tmp_path / "fp8", fp8_blocks=True))
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="has no quantization_config"):
        export_model(Export(tmp_path / "fp8", tmp_path / "again"))


def test_a_fmt_of_null_is_a_missing_one_and_a_block_is_no_truth_value():
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": None}
    assert fp8_blocks.block_size(quantization, "x") == (128, 128)
    with pytest.raises(InputError, match="weight_block_size"):
        fp8_blocks.block_size(quantization | {"weight_block_size": [128, True]}, "x")


def test_a_block_of_values_below_any_scale_gives_zeros():
    narrow, scales = fp8_blocks.quantise(torch.full((3, 4), 1e-44))
    assert torch.equal(fp8_blocks.dequantise(narrow, scales), torch.zeros(3, 4))
