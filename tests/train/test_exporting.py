"""``python -m train export``: a model or a checkpoint becomes a directory that transformers loads."""

import json
import os
import signal
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.train.model_cases import save_tiny
from train.main import main
from train.megatron.weights.directory import ModelDirectoryWriter


@pytest.mark.parametrize("kind", ["llama", "gpt_oss", "gemma4_text/experts", "minimax_m2"])
def test_what_is_exported_is_the_same_model(tmp_path, kind):
    reference = save_tiny(tmp_path / "model", kind)
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    argv = ["export", "--load", str(tmp_path / "model"), "--to", str(tmp_path / "out"), "--max-shard-gb", "0.00005"]
    assert main(argv) == 0
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for (name, ours), (_, theirs) in zip(
        sorted(loaded.state_dict().items()), sorted(reference.state_dict().items()), strict=True
    ):
        assert torch.equal(ours, theirs), name


def test_dtype_is_the_one_asked_for_and_said_in_the_config(tmp_path):
    save_tiny(tmp_path / "model", "deepseek_v3")
    argv = ["export", "--load", str(tmp_path / "model"), "--to", str(tmp_path / "out"), "--dtype", "bfloat16"]
    assert main(argv) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    dtypes = {name: tensor.dtype for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items()}
    biases = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert biases == {"model.layers.1.mlp.gate.e_score_correction_bias"}  # decides the routing: it stays exact


def test_values_that_the_dtype_cannot_hold_are_refused_by_name(tmp_path, capsys):
    save_tiny(tmp_path / "model", "llama")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    tensors["model.norm.weight"][3] = 7e4
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    argv = ["export", "--load", str(tmp_path / "model"), "--to", str(tmp_path / "out"), "--dtype"]
    assert main([*argv, "float16"]) == 2
    assert "model.norm.weight has values beyond 65504" in capsys.readouterr().err
    assert not list(tmp_path.glob("*out*"))
    assert main([*argv, "bfloat16"]) == 0


@pytest.mark.parametrize("size", ["nan", "inf", "0", "-1"])
def test_a_size_that_no_file_has_is_refused(tmp_path, capsys, size):
    with pytest.raises(SystemExit):
        main(["export", "--load", str(tmp_path), "--to", str(tmp_path / "out"), "--max-shard-gb", size])
    assert "--max-shard-gb: has to be above 0" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_export_leaves_nothing_behind(tmp_path, monkeypatch, number):
    save_tiny(tmp_path / "model", "llama")
    finish = ModelDirectoryWriter.finish

    def interrupted(self, *arguments):
        assert list(tmp_path.glob(".out.*"))
        os.kill(os.getpid(), number)
        time.sleep(0)  # Python runs the handler between two instructions
        finish(self, *arguments)

    monkeypatch.setattr(ModelDirectoryWriter, "finish", interrupted)
    try:
        status = main(["export", "--load", str(tmp_path / "model"), "--to", str(tmp_path / "out")])
    except SystemExit as ended:
        status = ended.code
    assert status == 128 + number
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_name_that_is_too_long_is_refused(tmp_path, capsys):
    save_tiny(tmp_path / "model", "llama")
    assert main(["export", "--load", str(tmp_path / "model"), "--to", str(tmp_path / ("n" * 250))]) == 2
    assert "--to" in capsys.readouterr().err


def test_stacked_experts_are_named_among_what_is_not_fp8(tmp_path):
    for kind, experts in (("gpt_oss", "mlp.experts"), ("gemma4_text/experts", "experts")):
        source, target = tmp_path / experts, tmp_path / f"{experts}-fp8"
        save_tiny(source, kind)
        assert main(["export", "--load", str(source), "--to", str(target), "--fp8-blocks"]) == 0
        kept = json.loads((target / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
        assert f"model.layers.1.{experts}" in kept  # transformers would else look for their scales
        assert len(set(kept)) == len(kept)


def test_a_directory_that_is_taken_or_a_source_that_is_broken_is_refused(tmp_path, capsys):
    save_tiny(tmp_path / "model", "llama")
    argv = ["export", "--load", str(tmp_path / "model"), "--to", str(tmp_path / "model")]
    assert main(argv) == 2
    assert "--to" in capsys.readouterr().err
    assert main(["export", "--load", str(tmp_path / "none"), "--to", str(tmp_path / "out")]) == 2
    file = tmp_path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    assert main(["export", "--load", str(tmp_path / "model"), "--to", str(tmp_path / "out")]) == 2
    assert "cut short" in capsys.readouterr().err
    assert not list(tmp_path.glob("*out*"))
