"""The accelerator that a run takes: what is refused before any worker starts, and a backend shipped with the job."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import accel.registry
from accel import AcceleratorError, Capabilities
from accel.backends.cpu import CpuAccelerator
from tests.accel.fake_backends import BlindToItsMask, fake, registry_of
from train.config.run import RunConfig
from train.devices import selected_accelerator
from train.prepare import check_devices

SHIPPED = """
    from accel.backends.cpu import CpuAccelerator
    class Shipped(CpuAccelerator):
        name = "shipped"
"""


@pytest.fixture
def registered(monkeypatch):
    """Backends of a registry that stands in for the process's."""

    def use(**factories):
        monkeypatch.setattr(accel.registry, "_process", registry_of(**factories))

    monkeypatch.delenv(accel.registry.SPEC_ENV, raising=False)
    monkeypatch.delenv(accel.registry.ACCELERATOR_ENV, raising=False)
    return use


def config(
    name: str, *, bf16: bool = False, deterministic: bool = False, launcher: str = "inline", code: Path | None = None
) -> RunConfig:
    return RunConfig(
        job={"accelerator": name, "launcher": launcher, "deterministic": deterministic},
        model={"bf16": bf16},
        reward={"user_code_dir": None if code is None else str(code)},
    )


class WithoutBf16(CpuAccelerator):
    name = "plain"
    capabilities = Capabilities(exclusive_devices=False, own_generator=False)


class WithoutMask(CpuAccelerator):
    name = "maskless"
    capabilities = Capabilities(own_generator=False)


def test_bf16_on_a_backend_without_it_is_refused_by_name(registered):
    registered(plain=WithoutBf16)
    with pytest.raises(AcceleratorError, match=r"--bf16: the accelerator 'plain' has no bf16"):
        selected_accelerator(config("plain", bf16=True))
    assert selected_accelerator(config("plain")).name == "plain"


def test_deterministic_kernels_on_a_backend_without_them_are_refused_by_name(registered):
    registered(plain=WithoutBf16)
    with pytest.raises(AcceleratorError, match=r"--deterministic: the accelerator 'plain' does not say that it can"):
        selected_accelerator(config("plain", deterministic=True))
    registered()
    assert selected_accelerator(config("cpu", deterministic=True)).name == "cpu"


def test_a_factory_that_no_worker_can_import_is_refused_for_ray_and_fine_inline(registered):
    registered(acme=fake("acme"))
    with pytest.raises(AcceleratorError, match="top level of an importable module"):
        selected_accelerator(config("acme", launcher="ray"))
    assert selected_accelerator(config("acme")).name == "acme"


def test_exclusive_devices_without_a_mask_are_refused_for_ray(registered):
    registered(maskless=WithoutMask)
    with pytest.raises(AcceleratorError, match="visible_devices_env"):
        selected_accelerator(config("maskless", launcher="ray"))


def test_a_backend_in_the_users_folder_is_selected_by_its_target(registered, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "shipped_in_process.py").write_text(textwrap.dedent(SHIPPED))
    registered()
    try:
        chosen = selected_accelerator(config("shipped_in_process:Shipped", launcher="ray", code=tmp_path))
        assert chosen.name == "shipped"
    finally:
        sys.modules.pop("shipped_in_process", None)


def test_a_job_of_more_devices_than_are_visible_is_refused_with_the_variable_and_both_numbers(monkeypatch):
    """slime 10."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    eight = RunConfig(job={"accelerator": "counted", "actor_num_gpus_per_node": 8, "launcher": "ray"})
    with pytest.raises(AcceleratorError, match=r"needs 9 counted device.*but 1 are there \(CUDA_VISIBLE_DEVICES=3\)"):
        check_devices(eight, BlindToItsMask())


BROKEN_IN_WORKERS = """
    import os
    from accel.backends.cpu import CpuAccelerator
    class Shipped(CpuAccelerator):
        name = "shipped"
        def unavailable_reason(self):
            return "no card on this node" if os.environ.get("ACCELRL_ACCELERATOR_SPEC") else None
"""


@pytest.mark.slow
def test_what_goes_wrong_as_a_worker_starts_is_said_in_its_own_words(tmp_path):
    (tmp_path / "shipped_backend.py").write_text(textwrap.dedent(BROKEN_IN_WORKERS))
    command = [str(Path(sys.executable).with_name("accelrl")), "train", "--accelerator", "shipped_backend:Shipped"]
    command += ["--user-code-dir", str(tmp_path), "--launcher", "ray", "--output-dir", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=tmp_path)
    assert done.returncode in (1, 2)
    assert "not usable in this worker: no card on this node" in done.stderr
    assert "ActorDiedError" not in done.stderr
    assert "Traceback" not in done.stderr


IN_CODE = """
    import sys
    sys.path.append(sys.argv[sys.argv.index("--user-code-dir") + 1])
    from accel import register_accelerator
    from shipped_backend import Shipped
    from train.main import main
    register_accelerator("shipped", Shipped)
    sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["by its target", "in code"])
def test_a_backend_shipped_with_the_job_trains_under_ray(tmp_path, way):
    code = tmp_path / "code"
    code.mkdir()
    (code / "shipped_backend.py").write_text(textwrap.dedent(SHIPPED))
    (tmp_path / "start.py").write_text(textwrap.dedent(IN_CODE))
    if way == "in code":
        command = [sys.executable, str(tmp_path / "start.py"), "--accelerator", "shipped"]
    else:
        command = [str(Path(sys.executable).with_name("accelrl")), "train", "--accelerator", "shipped_backend:Shipped"]
    command += ["--user-code-dir", str(code), "--launcher", "ray", "--num-rollout", "1"]
    done = subprocess.run(
        [*command, "--output-dir", str(tmp_path / "run")], capture_output=True, text=True, timeout=400, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 1
    assert '"shipped"' in (tmp_path / "run" / "config.toml").read_text()
