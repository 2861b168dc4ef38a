"""``python -m train export``: a model or a checkpoint becomes a directory that transformers loads."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.train.model_cases import save_tiny
from train.main import main
from train.megatron.weights.directory import ModelDirectoryWriter
from train.megatron.weights.partials import remove_leftovers
from train.megatron.weights.planned import PlannedShards


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


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_workers_write_what_one_would(tmp_path, kind):
    save_tiny(tmp_path / "model", kind)
    for options in ([], ["--fp8-blocks", "--max-shard-gb", "0.00002"], ["--dtype", "bfloat16"]):
        files = {}
        for workers in ("1", "5"):
            target = tmp_path / f"{workers} {options}"
            argv = ["export", "--load", str(tmp_path / "model"), "--to", str(target), "--workers", workers, *options]
            assert main(argv) == 0
            files[workers] = {path.name: path.read_bytes() for path in target.iterdir()}
        assert files["1"] == files["5"]
        assert all(len(load_file(target / name)) for name in files["5"] if name.endswith(".safetensors"))


def test_an_error_of_one_worker_is_the_exports_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    save_tiny(tmp_path / "model", "llama")
    put = PlannedShards.put

    def full(self, name, tensor):
        if name == "model.layers.1.mlp.up_proj.weight":
            raise OSError(28, "No space left on device")
        put(self, name, tensor)

    monkeypatch.setattr(PlannedShards, "put", full)
    argv = ["export", "--load", str(tmp_path / "model"), "--to", str(tmp_path / "out"), "--workers", "3"]
    assert main(argv) != 0
    assert "No space left on device" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(("value", "kept"), [(float("nan"), 1), (float("-inf"), 1)])
def test_values_that_are_no_numbers_are_refused_by_name_unless_asked_for(tmp_path, capsys, value, kept):
    save_tiny(tmp_path / "model", "llama")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    argv = ["export", "--load", str(tmp_path / "model"), "--to", str(tmp_path / "out")]
    assert main(argv) == 2
    said = capsys.readouterr().err
    assert "model.layers.1.mlp.up_proj.weight has values that are no numbers or infinite (1 of" in said
    assert "--allow-non-finite" in said
    assert main([*argv, "--allow-non-finite"]) == 0
    held = load_file(tmp_path / "out" / "model.safetensors")["model.layers.1.mlp.up_proj.weight"]
    assert int((~held.isfinite()).sum()) == kept


def test_what_a_killed_export_left_is_removed_by_the_next_and_said(tmp_path, capsys):
    save_tiny(tmp_path / "model", "llama")
    out = tmp_path / "out"
    killed = (
        "import os, sys; from train.megatron.weights.directory import ModelDirectoryWriter as W; "
        "W(sys.argv[1]); print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", killed, out], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        (living,) = tmp_path.glob(".out.*.partial")
        assert remove_leftovers(out) == []  # it is in use
        other.kill()
    foreign = tmp_path / ".out.notes.partial"
    foreign.symlink_to(tmp_path / "model")
    assert main(["export", "--load", str(tmp_path / "model"), "--to", str(out)]) == 0
    assert f"removed {living.name}, of an export to {out} that was killed" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.notes.partial", "model", "out"]


def test_a_model_that_was_put_aside_goes_only_once_another_stands_in_its_place(tmp_path):
    before = tmp_path / ".out.77.before"
    before.mkdir()
    assert remove_leftovers(tmp_path / "out") == []  # all that is left of it
    (tmp_path / "out").mkdir()
    assert remove_leftovers(tmp_path / "out") == [f"removed {before.name}, which {tmp_path / 'out'} had replaced"]
    assert not before.exists()
