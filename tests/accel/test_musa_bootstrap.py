"""MUSA's own modules are imported when MUSA is selected or probed, in the user's way, once, and never otherwise."""

import os
import subprocess
import sys
import textwrap

import pytest

TORCH_MUSA = """
    print("imported torch_musa")
    import sys, types, torch
    torch.utils.rename_privateuse1_backend("musa")
    module = types.ModuleType("torch.musa")
    module.is_available = lambda: True
    module.device_count = lambda: 2
    module.current_device = lambda: 0
    torch._register_device_module("musa", module)
"""


def run(tmp_path, code, modules, **environ):
    """Output of a fresh interpreter that finds stand-ins for the vendor's modules; theirs goes to standard error."""
    for name, source in modules.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
    env = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.getcwd()}"} | environ
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    theirs = [line for line in done.stderr.splitlines() if line.startswith(("imported", "trying"))]
    return theirs + done.stdout.splitlines()


SELECT = """
    import accel
    try:
        print("selected", accel.select_accelerator("{name}").name)
    except accel.AcceleratorError as error:
        print("error", error)
        cause = error.__cause__
        print("cause", type(cause).__name__, "from", type(cause and cause.__cause__).__name__)
"""


def test_selecting_another_accelerator_imports_none_of_it_whatever_is_set(tmp_path):
    modules = dict.fromkeys(("torch_musa.py", "musa_patch.py", "torchada.py"), "print('imported', __name__)")
    lines = run(
        tmp_path,
        SELECT.format(name="cpu"),
        modules,
        MUSA_PATCH_PATH=str(tmp_path),
        MUSA_VISIBLE_DEVICES="0",
        ACCELRL_MUSA_ROUTE="musa_patch",
    )
    assert lines == ["selected cpu"]


def test_selecting_musa_imports_torch_musa(tmp_path):
    lines = run(tmp_path, SELECT.format(name="musa"), {"torch_musa.py": TORCH_MUSA})
    assert lines == ["imported torch_musa", "selected musa"]


@pytest.mark.parametrize(
    ("environ", "module"),
    [
        ({"MUSA_PATCH_PATH": "patches"}, "musa_patch"),
        ({"ACCELRL_MUSA_ROUTE": "musa_patch"}, "musa_patch"),
        ({"ACCELRL_MUSA_ROUTE": "torchada"}, "torchada"),
    ],
)
def test_what_the_user_asks_for_is_imported_first_and_once(tmp_path, environ, module):
    folder = "patches/" if "MUSA_PATCH_PATH" in environ else ""
    modules = {"torch_musa.py": TORCH_MUSA, f"{folder}{module}.py": f"print('imported {module}')"}
    if folder:
        environ = {"MUSA_PATCH_PATH": str(tmp_path / "patches")}
    again = "    accel.available_accelerators()\n    accel.registry.process_registry().platform('musa').prepare()"
    code = SELECT.format(name="musa") + again
    lines = run(tmp_path, code, modules, **environ)
    assert lines == [f"imported {module}", "imported torch_musa", "selected musa"]


def test_an_error_in_the_patch_set_is_the_cause_and_is_not_tried_again(tmp_path):
    modules = {"torch_musa.py": TORCH_MUSA, "musa_patch.py": "print('trying')\nimport transformer_engine_of_2024"}
    lines = run(tmp_path, SELECT.format(name="musa") * 2, modules, ACCELRL_MUSA_ROUTE="musa_patch")
    assert lines.count("trying") == 1
    assert sum("transformer_engine_of_2024" in line for line in lines) == 2
    assert "cause AcceleratorError from ModuleNotFoundError" in lines
    assert "imported torch_musa" not in lines


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"ACCELRL_MUSA_ROUTE": "magic"}, "choose one of hook, musa_patch, torchada"),
        ({"MUSA_PATCH_PATH": "/nowhere"}, "'/nowhere' holds no musa_patch"),
        ({"MUSA_PATCH_PATH": "/nowhere", "ACCELRL_MUSA_ROUTE": "torchada"}, "unset one"),
    ],
)
def test_a_route_that_cannot_be_is_refused(tmp_path, environ, says):
    lines = run(tmp_path, SELECT.format(name="musa"), {"torch_musa.py": TORCH_MUSA}, **environ)
    assert says in lines[0]


def test_a_missing_torch_musa_is_a_reason_and_not_a_crash(tmp_path):
    assert "torch_musa is not installed" in run(tmp_path, SELECT.format(name="musa"), {})[0]
