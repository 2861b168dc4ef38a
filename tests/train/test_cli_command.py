"""The console script, how errors end a command, and folders of the user's that hold our packages' names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from accel.errors import AcceleratorError
from samples.errors import InputError
from train.cli import accelrl, run_guarded

ROOT = Path(__file__).resolve().parents[2]


def raising(error: BaseException):
    def command() -> int:
        raise error

    return command


@pytest.mark.parametrize("error", [InputError("--lr x: no"), AcceleratorError("--lr x: no")])
def test_our_errors_are_printed_as_they_are_and_give_status_2(capsys, error):
    assert run_guarded(raising(error)) == 2
    assert capsys.readouterr().err == "accelrl: error: --lr x: no\n"


def test_an_interrupt_gives_status_130(capsys):
    assert run_guarded(raising(KeyboardInterrupt())) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_other_errors_keep_their_traceback():
    for error in (RuntimeError("a bug"), ZeroDivisionError()):
        with pytest.raises(type(error)):
            run_guarded(raising(error))


def test_the_status_of_a_command_is_passed_on():
    assert run_guarded(lambda: 7) == 7


def test_no_command_prints_a_short_help(capsys):
    assert accelrl([]) == 2
    assert "accelrl COMMAND" in capsys.readouterr().err
    assert accelrl(["--help"]) == 0
    assert "  train    " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["trian"], "trian: unknown command; did you mean accelrl train?"),
        (["xyz"], "xyz: unknown command; the commands are train, accel, rollout"),
        (["--seed", "1"], "--seed: unknown command; flags come after the command: accelrl train --seed ..."),
    ],
)
def test_an_unknown_command_names_the_nearest(capsys, argv, said):
    assert accelrl(argv) == 2
    assert said in capsys.readouterr().err


def test_a_bad_flag_ends_the_train_command_with_one_line(capsys):
    assert accelrl(["train", "--rollout-temperature", "0"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("accelrl: error: --rollout-temperature 0: must be")
    assert err.count("\n") == 1


# Separate processes, since the module path of this one is already made.


@pytest.fixture
def hostile(tmp_path):
    """A user's folder with modules and packages named like ours, each of which fails when it is imported."""
    for name in ("accel", "hooks", "rollout", "observability"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise SystemExit('imported {name} of the user')\n")
    for name in ("filters", "samples"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('imported {name} of the user')\n")
    return tmp_path


def run_in(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    return subprocess.run(command, cwd=folder, env=env | environment, capture_output=True, text=True, timeout=120)


def script(folder: Path) -> list[str]:
    """The console script as an installed one starts: from a file elsewhere, whose folder is first on the path."""
    file = folder / "bin" / "accelrl"
    file.parent.mkdir()
    file.write_text("import sys\nfrom train.cli import accelrl\nsys.exit(accelrl())\n")
    return [sys.executable, str(file)]


def test_modules_of_the_user_do_not_shadow_ours_under_python_m(hostile):
    done = run_in(hostile, sys.executable, "-m", "train", "--print-config")
    assert done.returncode == 0, done.stderr
    assert "[rollout]" in done.stdout


def test_a_train_py_of_the_user_does_not_shadow_the_console_script(hostile, tmp_path_factory):
    (hostile / "train.py").write_text("raise SystemExit('imported train of the user')\n")
    done = run_in(hostile, *script(tmp_path_factory.mktemp("installed")), "train", "--print-config")
    assert done.returncode == 0, done.stderr
    assert "[rollout]" in done.stdout


@pytest.mark.parametrize("start", ["script", "python -m"])
def test_a_pythonpath_that_hides_our_packages_is_an_error_that_names_them(hostile, tmp_path_factory, start):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    command = [*script(elsewhere), "train"] if start == "script" else [sys.executable, "-m", "train"]
    done = run_in(elsewhere, *command, "--print-config", PYTHONPATH=str(hostile))
    assert done.returncode == 2
    assert f"accelrl: error: {hostile / 'accel'} hides accelrl's own package" in done.stderr
    assert "imported" not in done.stderr


def test_our_own_folder_stays_on_the_path():
    done = run_in(ROOT, sys.executable, "-m", "train", "--print-config", "--seed", "3")
    assert done.returncode == 0, done.stderr
    assert "seed = 3" in done.stdout


def test_the_configuration_loads_none_of_the_heavy_libraries():
    code = (
        "import sys, train.main, train.config.cli, train.cli\n"
        "train.config.cli.parse(['--seed', '1'])\n"
        "print(sorted({'torch', 'transformers', 'ray', 'megatron', 'numpy', 'pyarrow', 'aiohttp'} & set(sys.modules)))"
    )
    done = run_in(ROOT, sys.executable, "-c", code)
    assert done.stdout == "[]\n", done.stderr


def test_a_reader_that_stops_early_is_no_error():
    command = f"{sys.executable} -m train --help | head -n 1"
    done = run_in(ROOT, "bash", "-c", f"set -o pipefail; {command}")
    assert done.stderr == ""
    assert done.stdout.startswith("usage:")
