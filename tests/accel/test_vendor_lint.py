"""Vendors and their modules of torch stand in accel/backends, and in the few files that exist to translate them."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("accel", "samples", "observability", "hooks", "filters", "rollout", "train")
ALLOWED = {
    "accel/backends": "one file a vendor",
    "accel/emulation": "stands in for a vendor",
    "accel/retarget": "rewrites what other libraries hard-code",
    "accel/comm/backend_strings.py": "knows the collectives that every torch lists",
    "accel/registry.py": "imports the list of built-in backends",
    "rollout/engines/sglang/memory_tags.py": "what SGLang calls its memory",
    "accel/doctor/diagnosis.py": "lists versions of vendors' packages",
}
WORDS = {"cuda", "musa", "nccl", "mccl", "rocm", "hip", "npu", "xpu", "hpu", "mlu", "mps", "ascend"}
WORDS |= {"hccl", "xccl", "cncl"}
NEUTRAL = {"cpu", "gloo"}
COMMANDS = ("nvidia-smi", "rocm-smi", "npu-smi", "mthreads-gmi")
TORCH_MODULES = {"cuda", "musa", "npu", "xpu", "hpu", "mlu", "mps"}
OUR_BACKENDS = "accel.backends."
OPEN_TO_ALL = {"torch_device", "cpu", "cpu_namespace"}
VENDOR_PACKAGES = {"torch_musa", "torch_npu", "torchada", "musa_patch", "pynvml", "intel_extension_for_pytorch"}


def words_of(text: str) -> set[str]:
    """Vendor words in a string that is code ("cuda:0", "cpu:gloo, musa:mccl", "nvidia-smi -L"); prose may name them."""
    found = {command for command in COMMANDS if text.lower().startswith(command)}
    apart = text
    for separator in ":,.=/-_@":
        apart = apart.replace(separator, " ")
    words = apart.lower().split()
    if text.split() != [text] and not all(word in WORDS | NEUTRAL or word.isdecimal() for word in words):
        return found
    return found | (WORDS & set(words))


def findings(source: str) -> list[tuple[int, str]]:
    tree = ast.parse(source)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root = node.value
            if isinstance(root, ast.Name) and root.id == "torch" and node.attr in TORCH_MODULES:
                found.append((node.lineno, f"torch.{node.attr}"))
            elif node.attr in {"cuda", "is_cuda", "musa", "is_musa"}:
                found.append((node.lineno, f".{node.attr}"))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module or ''}.{name}" for name in names]
            for name in names:
                parts = name.split(".")
                ours = name.startswith(OUR_BACKENDS) and parts[2] not in OPEN_TO_ALL
                if ours or parts[0] in VENDOR_PACKAGES or (parts[0] == "torch" and TORCH_MODULES & set(parts)):
                    found.append((node.lineno, f"import {name}"))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and words_of(node.value):
            found.append((node.lineno, repr(node.value)))
    return found


def test_no_vendor_outside_the_listed_places():
    bad = []
    for path in sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(tuple(ALLOWED)):
            bad += [f"{name}:{line}: {what}" for line, what in findings(path.read_text())]
    assert not bad, "ask the accelerator instead (accel/contract.py):\n" + "\n".join(bad)


def test_every_listed_place_exists_or_is_planned():
    missing = {place for place in ALLOWED if not (ROOT / place).exists()}
    assert missing <= {"accel/emulation"}


@pytest.mark.parametrize(
    "code",
    [
        "torch.cuda.synchronize()",
        "x.to('cuda:0')",
        "x.cuda()",
        "import torch_musa",
        "from torch.cuda import nvtx",
        "from torch import cuda",
        "from torch import Tensor, mps",
        "import accel.backends.cuda",
        "from accel.backends import musa",
        "from accel.backends.cuda import CudaAccelerator",
        "backend = 'hccl'",
        "backend = 'xccl'",
        "device = 'ascend'",
        "device = 'mps'",
        "run(['nvidia-smi', '-L'])",
        "run('nvidia-smi -L')",
        "backends = 'cuda nccl'",
        "backend = 'cpu:gloo, musa:mccl'",
        "module = 'torch.cuda'",
        "if name == 'musa': pass",
        "backend = 'cpu:gloo,musa:mccl'",
        "device = f'cuda:{rank}'",
        "os.environ['CUDA_VISIBLE_DEVICES'] = '0'",
    ],
)
def test_the_lint_finds(code):
    assert findings(code)


@pytest.mark.parametrize("code", ["help = 'cpu, cuda or musa'", "cuda_like = 1", "x = 'archipelago'", "# torch.cuda\n"])
def test_the_lint_leaves_alone(code):
    assert not findings(code)
