"""What `make sglang-cpu` installs: its pins agree, and its shims do what SGLang asks of them."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "ci" / "sglang_cpu"


def load(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def names(text):
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return {re.split(r"[=<>]", line)[0].lower().replace("_", "-") for line in lines if line}


def test_every_requirement_is_pinned():
    pinned = names((FOLDER / "constraints.txt").read_text())
    install = load(FOLDER / "install.py", "sglang_cpu_install")
    wanted = names((FOLDER / "requirements.txt").read_text()) | {name.lower() for name in install.ROUTER_NEEDS}
    assert wanted - pinned == set()
    assert all("==" in line for line in (FOLDER / "constraints.txt").read_text().splitlines() if line[:1] not in "#")
    assert install.TORCH in (FOLDER / "constraints.txt").read_text().splitlines()


def test_the_environments_name_follows_from_the_pins(monkeypatch, tmp_path):
    install = load(FOLDER / "install.py", "sglang_cpu_install")
    (tmp_path / "constraints.txt").write_text("torch==1\n")
    monkeypatch.setattr(install, "HERE", tmp_path)
    before = install.fingerprint()
    assert before == install.fingerprint()
    (tmp_path / "constraints.txt").write_text("torch==2\n")
    assert before != install.fingerprint()


def test_cache_places_of_new_tokens_go_into_the_table():
    kernels = load(FOLDER / "shim" / "sgl_kernel" / "__init__.py", "sgl_kernel_shim")
    table = torch.zeros(3, 5, dtype=torch.int32)
    slots, starts, ends = torch.tensor([2, 0]), torch.tensor([1, 0]), torch.tensor([4, 2])
    kernels.assign_req_to_token_pool_cpu(slots, table, starts, ends, torch.tensor([7, 8, 9, 4, 5]), 5)
    assert table.tolist() == [[4, 5, 0, 0, 0], [0, 0, 0, 0, 0], [0, 7, 8, 9, 0]]


def test_a_kernel_that_is_not_there_says_so_when_it_is_called_and_gpu_kernels_cannot_be_imported():
    kernels = load(FOLDER / "shim" / "sgl_kernel" / "__init__.py", "sgl_kernel_shim")
    with pytest.raises(RuntimeError, match=r"sgl_kernel\.fused_experts_cpu: this CPU environment serves dense models"):
        kernels.fused_experts_cpu(1)
    with pytest.raises(AttributeError):
        _ = kernels.silu_and_mul


def test_the_operators_of_torchvision_are_declared_when_it_is_first_looked_for():
    before = list(sys.meta_path)
    try:
        shim = load(FOLDER / "shim" / "accelrl_torchvision_operators.py", "accelrl_torchvision_operators")
        (finder,) = [one for one in sys.meta_path if isinstance(one, shim.DeclareOperators)]
        assert finder.find_spec("torch") is None
        assert finder in sys.meta_path
        assert finder.find_spec("torchvision") is None
        assert finder not in sys.meta_path
        assert "dets" in str(torch.ops.torchvision.nms.default._schema)
    finally:
        sys.meta_path[:] = before
