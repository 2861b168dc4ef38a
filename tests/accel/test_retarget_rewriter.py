"""What the rewriter makes of each form of reaching CUDA, by running the result against a recording namespace."""

import ast
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.retarget.errors import MissingDeviceAttribute, MissingDeviceImport, RetargetError, UnknownSite
from accel.retarget.namespace import HELPERS_NAME, NAMESPACE_NAME, DeviceNamespace, SiteHelpers
from accel.retarget.rewriter import Rewriter
from accel.retarget.sites import USER_RULES, Site, SiteRules, megatron_rules

DEVICE = "meta"  # a device type that every torch has and that no rewriting rule knows
FORK = object()
TARGET = SimpleNamespace(
    current_device=lambda: 3,
    device_here=lambda: torch.device(DEVICE),
    Stream=str,
    FloatTensor=float,
    random=SimpleNamespace(fork=FORK),
    _lazy_call=lambda function: function(),
)


def rewrite(source: str, device: str = DEVICE, rules: SiteRules = USER_RULES) -> tuple[ast.Module, Rewriter]:
    rewriter = Rewriter(device, rules, "model.py")
    return rewriter.rewrite(ast.parse(source)), rewriter


def run(source: str) -> dict[str, object]:
    tree, _ = rewrite(source)
    namespace = DeviceNamespace(DEVICE, TARGET)
    scope = {
        "__name__": "model",
        NAMESPACE_NAME: namespace,
        HELPERS_NAME: SiteHelpers(DEVICE, namespace),
        "recorder": SimpleNamespace(to=lambda *args, **kwargs: (args, kwargs)),
    }
    exec(compile(tree, "model.py", "exec"), scope)
    return scope


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch\nx = torch.cuda.current_device()", 3),
        ("import torch as th\nx = th.cuda.current_device()", 3),
        ("import torch\ncuda = torch.cuda\nx = cuda.current_device()", 3),
        ("from torch import cuda\nx = cuda.current_device()", 3),
        ("from torch import cuda as c, nn\nx = (c.current_device(), nn.Module.__name__)", (3, "Module")),
        ("import torch.cuda\nx = torch.cuda.current_device()", 3),
        ("import torch.cuda.random\nx = torch.cuda.current_device()", 3),
        ("import torch.cuda as tc\nx = tc.current_device()", 3),
        ("import torch.cuda.random as r\nx = r.fork", FORK),
        ("from torch.cuda import current_device as here\nx = here()", 3),
        ("from torch.cuda.random import fork as x", FORK),
        ("from torch.cuda import _lazy_call\nx = []\n_lazy_call(lambda: x.append(1))", [1]),
        ("import torch\nx = getattr(torch, 'cuda').current_device()", 3),
        ("import torch\nx = getattr(torch, 'cuda', None).current_device()", 3),
        ("import torch\nx = getattr(torch.cuda, 'current_device')()", 3),
        ("import torch\nx = hasattr(torch, 'cuda')", True),
        ("import torch\nx = hasattr(torch.cuda, 'MemPool')", False),
        ("import torch\nx = torch.get_device_module('cuda').current_device()", 3),
        ("import torch\nx = hasattr(torch._C, '_cuda_setRNGState')", False),
        ("from torch import _C\nx = hasattr(_C, '_cuda_setRNGState') and callable(_C._cuda_setRNGState)", False),
        ("x = 'cuda'", DEVICE),
        ("def f(device='cuda'): return device\nx = f()", DEVICE),
        ("x = {'device': 'cuda'}['device']", DEVICE),
        ("def f(d):\n match d:\n  case 'cuda': return 1\nx = f('meta')", 1),
        ("x = 'cuda:1'", f"{DEVICE}:1"),
        ("import torch\nx = f'cuda:{torch.cuda.current_device()}'", f"{DEVICE}:3"),
        ("import torch\nx = f'cuda:{torch.cuda.device_here()}'", f"{DEVICE}:0"),
        ("import torch\nx = torch.device('cuda')", torch.device(DEVICE)),
        ("import torch\nx = torch.device('cuda', torch.cuda.current_device())", torch.device(DEVICE, 3)),
        ("import torch\nx = torch.device('cuda', torch.cuda.device_here())", torch.device(DEVICE)),
        ("import torch\nx = torch.device(type='cuda', index=2)", torch.device(DEVICE, 2)),
        ("import torch\nx = torch.device('cpu', 0)", torch.device("cpu", 0)),
        ("x = 'torch.cuda.FloatTensor'", f"torch.{DEVICE}.FloatTensor"),
        ("x = 'not torch.cuda.HalfTensor, '", f"not torch.{DEVICE}.HalfTensor, "),
        ("n = 1\nx = f'{n} torch.cuda.HalfTensor'", f"1 torch.{DEVICE}.HalfTensor"),
        ("import torch\nx = torch.cuda.FloatTensor", float),
        ("x = recorder.cuda()", ((DEVICE,), {})),
        ("x = recorder.cuda(non_blocking=True)", ((DEVICE,), {"non_blocking": True})),
        ("x = recorder.cuda(1)", ((torch.device(DEVICE, 1),), {})),
        ("x = recorder.cuda(1, True)", ((torch.device(DEVICE, 1),), {"non_blocking": True})),
        ("x = recorder.cuda('cuda')", ((torch.device(DEVICE),), {})),
        (
            "import torch\nx = recorder.cuda(device=torch.cuda.current_device())",
            ((torch.device(DEVICE, 3),), {}),
        ),
        ("x = hasattr(recorder, 'cuda')", True),
        ("try:\n from torch.cuda import MemPool\n x = True\nexcept ImportError:\n x = False", False),
        ("try:\n from torch.cuda import MemPool\n x = True\nexcept (OSError, ImportError):\n x = False", False),
    ],
)
def test_form_reaches_the_device(source: str, expected: object) -> None:
    assert run(source)["x"] == expected


@pytest.mark.parametrize(
    "source",
    [
        '"""Runs on cuda: see torch.cuda.amp."""\n',
        'class A:\n    "cuda"\n    field: int = 1\n    "cuda:%d"\n',
        "import torch\nx = torch.backends.cuda.matmul, torch.version.cuda\n",
        "import torch\nx = getattr(torch.version, 'cuda', None)\n",
        "import cupy as cp\ncp.cuda.ExternalStream(1)\n",
        "def f(t): return t.is_cuda\n",
        "x = '> built %d cuda graphs', 'Needs cuda: none found', 'cuda-python', 'cuda_graph', '/usr/local/cuda'\n",
        "n = 1\nx = f'{n} cuda graphs', f'cuda graph {n}', f'device cuda:{n} is full'\n",
        "def f(s: 'torch.cuda.Stream', *, t: 'list[torch.cuda.Event]' = ()) -> 'torch.cuda.Event': ...\n",
        "class Model:\n    def cuda(self): return self\n    def use(self): self.cuda = True\n",
        "# torch.cuda and 'cuda:%d' in a comment\n",
    ],
)
def test_text_and_names_that_reach_nothing_stay(source: str) -> None:
    tree, rewriter = rewrite(source)
    assert ast.dump(tree) == ast.dump(ast.parse(source))
    assert not rewriter.found


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("x = 'cuda:%d' % 1", "'cuda:%d'"),
        ("x = 'cuda:{}'.format(1)", "'cuda:{}'"),
        ("x = 'cuda:' + str(1)", "'cuda:'"),
        ("x = f'cuda:{a}{b}'", "cuda:{a}{b}"),
        ("x = f'cuda:{a:02d}'", "cuda:{a:02d}"),
        ("x = f'torch.cuda.{a}'", "torch.cuda.{a}"),
        ("x = 'cpu:gloo,cuda:nccl'", "cpu:gloo,cuda:nccl"),
        ("x = sys.modules['torch.cuda']", "torch.cuda"),
        ("x = importlib.import_module('torch.cuda.amp')", "torch.cuda.amp"),
        ("from torch.cuda import *", "import *"),
        ("torch.cuda = None", "replaced"),
        ("del torch.cuda", "deleted"),
        ("setattr(torch, 'cuda', None)", "setattr"),
        ("x = getattr(tensor, 'cuda')()", "getattr"),
        ("x = map(torch.Tensor.cuda, xs)", "torch.Tensor.cuda"),
        ("x = torch.Tensor.cuda(t)", "torch.Tensor.cuda"),
        ("move = tensor.cuda", "tensor.cuda"),
        ("x = self.torch.cuda.current_device()", "self.torch.cuda"),
        ("x = tensor.cuda(*args)", "spelled out"),
        ("x = tensor.cuda(**options)", "spelled out"),
        ("x = {'cuda': 1, 'meta': 2}", "become one"),
        ("from compat import th; th.cuda.synchronize()", "th.cuda"),
    ],
)
def test_unknown_form_is_named_with_file_and_line(line: str, named: str) -> None:
    with pytest.raises(UnknownSite, match=r"model\.py, line 3: ") as error:
        rewrite(f"import torch\n\n{line}\n")
    assert named in str(error.value)


def test_kind_outside_the_versions_list_is_an_error() -> None:
    rules = megatron_rules("0.16.1")
    rewrite("import torch\nx = torch.cuda.current_device()\n", rules=rules)
    assert Site.GETATTR not in rules.kinds
    with pytest.raises(UnknownSite, match="line 2"):
        rewrite("import torch\nx = getattr(torch, 'cuda')\n", rules=rules)


@pytest.mark.parametrize("version", ["0.16.0", "0.17.0", "0.17.0rc1", "1.16.1", "unreleased"])
def test_untested_megatron_version_names_the_tested_ones(version: str) -> None:
    with pytest.raises(RetargetError, match=rf"megatron-core {version} .*>=0\.16\.1,<0\.17\.0"):
        megatron_rules(version)


def test_missing_attribute_names_attribute_module_and_line() -> None:
    with pytest.raises(MissingDeviceAttribute, match=r"model line 3 .*torch\.cuda\.MemPool.*'meta'"):
        run("import torch\n\nx = torch.cuda.MemPool()")
    with pytest.raises(AttributeError):
        run("import torch\nx = torch.cuda.MemPool()")


def test_uncaught_import_of_a_missing_name_fails_when_it_is_used() -> None:
    module = run("from torch.cuda.memory import Allocator\ndef use(): return Allocator(1)")
    with pytest.raises(MissingDeviceAttribute, match=r"model line 2 .*torch\.cuda\.memory\.Allocator"):
        module["use"]()
    for use in ("Allocator.handle", "class A(Allocator): ...", "isinstance(1, Allocator)", "with Allocator: ..."):
        with pytest.raises(MissingDeviceAttribute, match="Allocator"):
            run(f"from torch.cuda.memory import Allocator\n{use}")


def test_caught_import_of_a_missing_name_says_what_is_missing() -> None:
    source = "try:\n from torch.cuda.memory import Pool\nexcept ImportError as error:\n x = error"
    error = run(source)["x"]
    assert isinstance(error, MissingDeviceImport)
    assert "model line 2" in str(error)
    assert "torch.cuda.memory.Pool" in str(error)


def test_namespace_is_read_only() -> None:
    with pytest.raises(RetargetError, match=r"model line 2 .*sets torch\.cuda\.synchronize"):
        run("import torch\ntorch.cuda.synchronize = None")
    with pytest.raises(RetargetError, match=r"deletes torch\.cuda\.Stream"):
        run("import torch\ndel torch.cuda.Stream")


def test_cuda_device_that_arrives_at_run_time_is_refused() -> None:
    with pytest.raises(RetargetError, match=r"model line 2 .*'cuda:0'.*'meta'"):
        run("name = 'cud' + 'a:0'\nx = recorder.cuda(name)")


def test_host_tensor_types_have_no_device_part() -> None:
    tree, _ = rewrite("x = 'torch.cuda.BFloat16Tensor'", device="cpu")
    assert ast.unparse(tree) == "x = 'torch.BFloat16Tensor'"


def test_line_numbers_stay() -> None:
    source = "import torch\n\ndef f():\n    torch.cuda.synchronize()\n\n    raise ValueError\n"
    with pytest.raises(MissingDeviceAttribute) as error:
        run(source + "f()\n")
    frames = [entry.lineno + 1 for entry in error.traceback if str(entry.path).endswith("model.py")]
    assert frames == [7, 4]


PIECES = [*"cuda:.,torch0 %{}/_-", "cuda", "torch.cuda.", "Tensor"]
TEXTS = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


@settings(max_examples=300, deadline=None)
@given(TEXTS)
def test_text_names_the_device_or_stays_or_is_refused(text: str) -> None:
    try:
        tree, rewriter = rewrite(f"x = {text!r}")
    except UnknownSite:
        assert "cuda" in text
        assert " " not in text
        return
    result = ast.literal_eval(tree.body[0].value)
    if rewriter.found:
        assert result.replace(DEVICE, "cuda") == text
    else:
        assert result == text
    assert rewrite(f"x = {result!r}")[1].found.total() == 0


@settings(max_examples=100, deadline=None)
@given(TEXTS)
def test_documentation_is_never_rewritten(text: str) -> None:
    source = f"{text!r}\ndef f():\n    {text!r}\nclass A:\n    {text!r}\n    async def g(self):\n        {text!r}\n"
    tree, _ = rewrite(source)
    assert ast.dump(tree) == ast.dump(ast.parse(source))


@pytest.mark.slow
def test_every_module_of_the_installed_megatron_is_understood() -> None:
    root = next(Path(path, "megatron", "core") for path in sys.path if Path(path, "megatron", "core").is_dir())
    info = ModuleType("package_info")
    exec((root / "package_info.py").read_text(), info.__dict__)
    rules = megatron_rules(info.__version__)
    found = set()
    for path in sorted(root.rglob("*.py")):
        tree, rewriter = rewrite(path.read_text(), rules=rules)
        found |= set(rewriter.found)
        documentation = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr == "cuda":
                assert ast.unparse(node) in ("torch.backends.cuda", "cp.cuda", "torch.version.cuda"), path
            elif isinstance(node, ast.Constant) and node not in documentation:
                assert node.value != "cuda", path
    assert found == rules.kinds
