"""The sample vendor's package, installed by pip into a fresh environment: found, selected, proven, trained on."""

import json
import os
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "vendor_backend"

pytestmark = pytest.mark.slow


def run(python, *arguments, **environ):
    env = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELRL_", "PYTHONPATH"))}
    return subprocess.run([python, *arguments], capture_output=True, text=True, env=env | environ, timeout=900)


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """A fresh environment that sees this one's packages, with the sample installed from its folder."""
    folder = tmp_path_factory.mktemp("vendor")
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    packages = run(python, "-c", "import site; print(site.getsitepackages()[0])").stdout.strip()
    ours = [path for path in site.getsitepackages() if Path(path).is_dir()]
    lines = [f"import site; site.addsitedir({path!r})" for path in ours]
    (Path(packages) / "base.pth").write_text("\n".join(lines) + "\n")
    run(python, "-m", "pip", "uninstall", "--yes", "setuptools")  # the one that venv brings is older than we ask for
    source = shutil.copytree(EXAMPLE, folder / "source")
    done = run(python, "-m", "pip", "install", "--no-deps", "--no-index", "--no-build-isolation", str(source))
    assert done.returncode == 0, done.stdout + done.stderr
    return str(python)


def test_its_backend_is_short():
    assert len((EXAMPLE / "samplevendor_accel" / "backend.py").read_text().splitlines()) <= 40


def test_it_is_not_there_unless_installed():
    listed = run(sys.executable, "-m", "accel", "list", "--json")
    assert "samplevendor" not in json.loads(listed.stdout)


def test_it_is_listed_and_selected_by_name_and_by_priority(python):
    listed = run(python, "-m", "accel", "list", "--json")
    assert json.loads(listed.stdout)["samplevendor"]["usable"], listed.stdout + listed.stderr
    for arguments, environ in [
        ((), {}),
        (("--accelerator", "samplevendor"), {}),
        ((), {"ACCELRL_ACCELERATOR": "samplevendor"}),
    ]:
        doctor = run(python, "-m", "accel", "doctor", "--json", *arguments, **environ)
        assert json.loads(doctor.stdout)["selected"] == "samplevendor"


def test_without_a_visible_card_it_is_refused_with_the_reason(python):
    hidden = run(python, "-m", "accel", "doctor", "--accelerator", "samplevendor", SAMPLEVENDOR_VISIBLE_DEVICES="")
    assert hidden.returncode == 1
    assert "shows no card" in hidden.stdout


def test_it_passes_conformance(python):
    arguments = ("--accelerator", "samplevendor", "--world-size", "2", "--json")
    done = run(python, "-m", "accel", "conformance", *arguments)
    report = json.loads(done.stdout)
    assert done.returncode == 0, [o for o in report["outcomes"] if o["result"] == "FAIL"]
    assert all("need" in outcome["reason"] for outcome in report["outcomes"] if outcome["result"] == "SKIP")


def test_it_trains(python, tmp_path):
    arguments = ("--accelerator", "samplevendor", "--num-rollout", "5", "--output-dir", str(tmp_path / "run"))
    done = run(python, "-m", "train", *arguments)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 5
    assert "samplevendor" in (tmp_path / "run" / "config.toml").read_text()
