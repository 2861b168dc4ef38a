import subprocess
import sys
import textwrap

import pytest

from samples import InputError, load_function

FLAG = "--custom-rm-path"


@pytest.fixture
def user_dir(tmp_path, monkeypatch):
    """A directory of user code; what a test imports from it is forgotten afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("samples.loading._loaded", {})
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(directory, name: str, code: str) -> None:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(code))


def test_functions_methods_and_callables_of_packages_are_found(user_dir):
    write(user_dir, "my_pkg/__init__.py", "")
    write(
        user_dir,
        "my_pkg/scores.py",
        """
        def score(): return "function"
        class Scorer:
            @staticmethod
            def score(): return "method"
        """,
    )
    for path, result in (("my_pkg.scores.score", "function"), ("my_pkg.scores.Scorer.score", "method")):
        assert load_function(path, FLAG, str(user_dir))() == result
    assert load_function("samples.Sample", FLAG).__name__ == "Sample"


def test_a_module_is_run_once(user_dir):
    write(user_dir, "my_counter.py", "runs = []\ndef f(): return runs\nruns.append(1)\n")
    first = load_function("my_counter.f", FLAG, str(user_dir))
    assert load_function("my_counter.f", FLAG, str(user_dir)) is first
    assert first() == [1]


def test_the_directory_is_resolved_and_comes_last(user_dir, monkeypatch):
    write(user_dir, "sub/my_module.py", "def f(): return 1\n")
    monkeypatch.chdir(user_dir)
    assert load_function("my_module.f", FLAG, "sub")() == 1
    assert sys.path[-1] == str((user_dir / "sub").resolve())


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("score", r"'score': expected module\.function"),
        ("my module.f", r"expected module\.function"),
        ("rewards/score.py", r"expected module\.function"),
        (".f", r"expected module\.function"),
        ("absent_module.f", "no module 'absent_module' in --user-code-dir"),
        ("my_module.absent", r"my_module \(.*my_module\.py\) has no 'absent'"),
        ("my_module.Thing.absent", r"my_module\.Thing \(.*\) has no 'absent'"),
        ("my_module.absent.f", r"has no 'absent'"),
        ("my_module.NUMBER", "is a int, expected a function"),
        ("broken.f", r"module 'broken' could not be imported: ZeroDivisionError: division by zero"),
        ("syntax.f", r"module 'syntax' could not be imported: SyntaxError"),
        ("leaves.f", r"module 'leaves' could not be imported: SystemExit: 3"),
        ("needs.f", r"module 'needs' imports 'not_installed_anywhere', which is not there"),
    ],
)
def test_what_cannot_be_loaded_names_flag_path_and_reason(user_dir, path, message):
    write(user_dir, "my_module.py", "NUMBER = 3\nclass Thing: pass\n")
    write(user_dir, "broken.py", "1 / 0\n")
    write(user_dir, "syntax.py", "def f(:\n")
    write(user_dir, "leaves.py", "raise SystemExit(3)\n")
    write(user_dir, "needs.py", "import not_installed_anywhere\n")
    with pytest.raises(InputError, match=rf"{FLAG} .*{message}"):
        load_function(path, FLAG, str(user_dir))


def test_the_modules_own_error_is_kept_as_the_cause(user_dir):
    write(user_dir, "broken.py", "1 / 0\n")
    with pytest.raises(InputError) as caught:
        load_function("broken.f", FLAG, str(user_dir))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_failure_is_tried_again_once_mended(user_dir):
    with pytest.raises(InputError):
        load_function("late.f", FLAG, str(user_dir))
    write(user_dir, "late.py", "def f(): return 1\n")
    sys.path_importer_cache.clear()
    assert load_function("late.f", FLAG, str(user_dir))() == 1


def test_without_a_user_directory_the_flag_that_names_one_is_told():
    with pytest.raises(InputError, match="--user-code-dir names the directory"):
        load_function("absent_module.f", FLAG)


def test_a_user_directory_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(InputError, match=r"--user-code-dir .*no such directory"):
        load_function("absent_module.f", FLAG, str(tmp_path / "absent"))


@pytest.mark.parametrize("name", ["hooks.py", "hooks/__init__.py", "json.py"])
def test_a_users_module_with_a_name_of_ours_or_pythons_is_not_taken_and_said_so(user_dir, name):
    write(user_dir, name, "def mine(): return 1\n")
    top = name.removesuffix(".py").removesuffix("/__init__")
    with pytest.raises(InputError, match=rf"has no 'mine'\..*{user_dir.name}.*{top}.* is hidden by .*rename yours"):
        load_function(f"{top}.mine", FLAG, str(user_dir))


def test_a_users_module_inside_a_hidden_package_is_said_so_too(user_dir):
    write(user_dir, "train/my_rewards.py", "def f(): return 1\n")
    with pytest.raises(InputError, match=r"has no 'my_rewards'\. Your .*train is hidden by"):
        load_function("train.my_rewards.f", FLAG, str(user_dir))


def test_importing_samples_loads_nothing_heavy():
    heavy = "{'torch', 'numpy', 'pyarrow', 'transformers', 'pydantic'}"
    code = f"import sys, samples; print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
