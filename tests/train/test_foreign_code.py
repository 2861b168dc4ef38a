"""Code and pickles that come with others' files: never read or run unless asked for."""

from __future__ import annotations

import ast
import json
import pickle
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from rollout.engines.torch_engine.opening import DecoderChoice, DecoderSettings, open_config, open_decoder
from samples.errors import InputError
from samples.tokenizer import load_tokenizer
from tests.train.safe_cases import REPOSITORY, login_environment, model_flags, train_command, write_model
from train.megatron.model import load_hf_config

PACKAGES = ("accel", "samples", "observability", "hooks", "filters", "rollout", "train")
# marshal is as open as pickle. The code cache reads only files that this user alone can write.
READS_OWN_FILES = {Path("accel/retarget/code_cache.py")}
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
TORCH_LOADS = {"torch.load", "torch.jit.load", "torch.hub.load", "torch.package.PackageImporter"}


def _unsafe_readers(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            if module == "pickle" and {alias.name for alias in node.names} <= {"dump", "dumps"}:
                continue  # writing runs nothing
            names = [module or ""] if module else [alias.name for alias in node.names]
            yield from (f"{path}:{node.lineno} imports {n}" for n in names if n.partition(".")[0] in UNSAFE_MODULES)
        elif isinstance(node, ast.Call):
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            called = ast.unparse(node.func)
            if called in TORCH_LOADS and keywords.get("weights_only") != "True":
                yield f"{path}:{node.lineno} calls {called} without weights_only=True"
            if keywords.get("allow_pickle", "False") != "False" or keywords.get("trust_remote_code") == "True":
                yield f"{path}:{node.lineno} calls {called} with {keywords}"


def test_no_module_reads_what_can_run_code() -> None:
    paths = [path for package in PACKAGES for path in (REPOSITORY / package).rglob("*.py")]
    assert len(paths) > 100
    found = [
        reader
        for path in paths
        if path.relative_to(REPOSITORY) not in READS_OWN_FILES
        for reader in _unsafe_readers(path)
    ]
    assert found == []


def test_the_search_for_unsafe_readers_finds_them(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, pickle\nfrom joblib import load\nimport numpy, torch\ntorch.load('x')\n"
        "torch.load('x', weights_only=True)\nnumpy.load('x', allow_pickle=True)\nf('x', trust_remote_code=True)\n"
        "from pickle import dumps\nfrom pickle import dumps, loads\n"
    )
    assert [int(found.partition(":")[2].split()[0]) for found in sorted(_unsafe_readers(program))] == [1, 2, 4, 6, 7, 9]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


class _Trap:
    """Unpickled, it makes a file."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self._marker,)


def _with_trapped_weights(model_dir: Path, directory: Path) -> Path:
    """A copy of a model whose weights are a pickle; the file that reading it makes."""
    shutil.copytree(model_dir, directory, ignore=shutil.ignore_patterns("*.safetensors", "example"))
    marker = directory.with_name("unpickled")
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps({"model.norm.weight": _Trap(marker)}))
    return marker


@pytest.mark.parametrize("decoder", ["dense", "general"])
def test_the_engine_refuses_weights_that_are_a_pickle(tmp_path: Path, model_dir: Path, decoder: DecoderChoice) -> None:
    marker = _with_trapped_weights(model_dir, tmp_path / "model")
    settings = DecoderSettings(
        tmp_path / "model", torch.float32, torch.device("cpu"), max_rows=1, max_len=16, max_total_tokens=None,
        free_memory=None, threads=1, load_weights=True, choice=decoder,
    )  # fmt: skip
    with pytest.raises(InputError, match=r"pytorch_model\.bin is a pickle"):
        open_decoder(open_config(tmp_path / "model"), settings)
    assert not marker.exists()


@pytest.mark.slow
def test_a_run_refuses_weights_that_are_a_pickle(tmp_path: Path, model_dir: Path) -> None:
    marker = _with_trapped_weights(model_dir, tmp_path / "model")
    command = train_command(tmp_path / "run", *model_flags(tmp_path / "model"), "--launcher", "inline")
    done = subprocess.run(command, env=login_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pytorch_model.bin is a pickle" in done.stderr
    assert not marker.exists()


@pytest.fixture
def code_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where transformers keeps the code of models that it runs, for this test only."""
    from transformers import dynamic_module_utils

    cache = tmp_path / "modules"
    cache.mkdir()
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(cache))
    monkeypatch.syspath_prepend(str(cache))


def _with_own_code(model_dir: Path, directory: Path, model_type: str) -> Path:
    """A copy of a model that brings a configuration and a tokenizer of its own; the file that their code makes."""
    shutil.copytree(model_dir, directory, ignore=shutil.ignore_patterns("example"))
    marker = directory.with_name("code-ran")
    (directory / "own_code.py").write_text(
        "from transformers import PretrainedConfig, PreTrainedTokenizerFast\n"
        f"open({str(marker)!r}, 'w').close()\n"
        f"class OwnConfig(PretrainedConfig):\n    model_type = {model_type!r}\n"
        "class OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    own = {
        "config.json": {"model_type": model_type, "auto_map": {"AutoConfig": "own_code.OwnConfig"}},
        "tokenizer_config.json": {
            "tokenizer_class": "OwnTokenizer",
            "auto_map": {"AutoTokenizer": [None, "own_code.OwnTokenizer"]},
        },
    }
    for name, entries in own.items():
        path = directory / name
        path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    return marker


READERS: dict[str, Callable[..., object]] = {
    "trainer": load_hf_config,
    "engine": open_config,
    "tokenizer": load_tokenizer,
}


@pytest.mark.usefixtures("code_cache")
@pytest.mark.parametrize("reader", READERS.values(), ids=READERS.keys())
def test_code_that_comes_with_a_model_runs_only_when_asked_for(
    tmp_path: Path, model_dir: Path, reader: Callable[..., object]
) -> None:
    marker = _with_own_code(model_dir, tmp_path / "model", "qwen3")
    reader(tmp_path / "model")  # with the classes of transformers' own
    assert not marker.exists()
    reader(tmp_path / "model", trust_remote_code=True)
    assert marker.exists()


def test_a_model_that_needs_its_own_code_is_refused_by_name(tmp_path: Path, model_dir: Path) -> None:
    marker = _with_own_code(model_dir, tmp_path / "model", "unheard_of")
    with pytest.raises(InputError, match="--trust-remote-code"):
        open_config(tmp_path / "model")
    assert not marker.exists()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["inline", "ray"])
def test_a_run_ignores_code_that_comes_with_its_model(tmp_path: Path, model_dir: Path, launcher: str) -> None:
    marker = _with_own_code(model_dir, tmp_path / "model", "qwen3")
    flags = ("--launcher", launcher, "--save-hf", str(tmp_path / "hf"))
    command = train_command(tmp_path / "run", *model_flags(tmp_path / "model"), *flags, steps=1)
    done = subprocess.run(command, env=login_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not marker.exists()
