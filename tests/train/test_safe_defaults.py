"""What a run opens to others, runs of theirs, and leaves behind, unless it is told to."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest

from samples.errors import InputError
from tests.train.process_sockets import ListeningSocket, listening_sockets, run_processes
from tests.train.safe_cases import REPOSITORY, login_environment, model_flags, train_command, write_model
from train.local_ray import private_directory, sweep

LAUNCHERS = {
    "inline": ("--launcher", "inline"),
    "ray": ("--launcher", "ray"),
    "two-ranks": ("--launcher", "ray", "--tensor-model-parallel-size", "2"),
}

needs_proc = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads /proc/net/tcp")


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """A directory whose path is short enough for Unix sockets in it, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as directory:
        yield Path(directory).resolve()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


# Sockets


def _outside_address() -> str | None:
    """An address of this machine that others can reach, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent
        except OSError:
            return None
        address: str = probe.getsockname()[0]
    return None if address.startswith("127.") else address


def _with_outside_hostname() -> list[str]:
    """A prefix that makes the command's machine name stand for an outside address, as on most servers.

    On a machine whose name stands for 127.0.0.1, what binds to the machine's name would look safe here only.
    """
    address = _outside_address()
    prefix = ["unshare", "--user", "--map-root-user", "--uts", "sh", "-c", f'hostname {address} && exec "$@"', "-"]
    if address is None or shutil.which("unshare") is None:
        return []
    tried = subprocess.run([*prefix, "hostname"], capture_output=True, text=True, check=False)
    return prefix if tried.stdout.strip() == address else []


def _sockets_of_run(command: Sequence[str]) -> set[ListeningSocket]:
    """Every socket that the run or one of its processes listened on at any look from its start to its end."""
    marker = f"ACCELRL_TEST_RUN={uuid.uuid4().hex}"
    name, _, value = marker.partition("=")
    process = subprocess.Popen(
        command,
        env=login_environment(**{name: value}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    seen: set[ListeningSocket] = set()
    while process.poll() is None:
        seen |= listening_sockets(run_processes(process.pid, marker))
        time.sleep(0.2)
    assert process.stdout is not None
    assert process.returncode == 0, process.stdout.read()
    return seen


@needs_proc
def test_the_list_of_sockets_shows_one_that_is_open_to_all() -> None:
    """The measuring instrument: a grandchild in a session of its own, listening on every interface."""
    program = """if True:
        import socket, sys
        server = socket.create_server(("", 0))
        print(server.getsockname()[1], flush=True)
        sys.stdin.read()
    """
    marker = f"ACCELRL_TEST_RUN={uuid.uuid4().hex}"
    name, _, value = marker.partition("=")
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | {name: value},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        port = int(child.stdout.readline())
        (found,) = (s for s in listening_sockets(run_processes(os.getpid(), marker)) if s.port == port)
        child.stdin.close()
    assert not found.is_loopback


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize("flags", LAUNCHERS.values(), ids=LAUNCHERS.keys())
def test_a_running_job_listens_on_loopback_only(tmp_path: Path, model_dir: Path, flags: tuple[str, ...]) -> None:
    command = train_command(tmp_path / "run", *model_flags(model_dir), *flags)
    seen = _sockets_of_run([*_with_outside_hostname(), *command])
    assert seen, "a job opens some sockets, to itself; none were found"
    assert [found for found in seen if not found.is_loopback] == []
    if "2" in flags:
        assert "ray::TrainerAct" in {found.process for found in seen}


# Files


def _files(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def _saving_command(output: Path, launcher: str) -> list[str]:
    flags = ["--launcher", launcher, "--save", str(output / "saved"), "--save-interval", "1"]
    return train_command(output / "run", *flags, "--save-hf", str(output / "hf"), "--eval-interval", "1", steps=2)


def _folders(parent: Path, *names: str) -> list[Path]:
    folders = [parent / name for name in names]
    for folder in folders:
        folder.mkdir()
    return folders


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["inline", "ray"])
def test_a_run_leaves_files_in_its_output_save_and_cache_directories_only(short_directory: Path, launcher: str) -> None:
    home, work, cache, temporary, output = _folders(short_directory, "home", "work", "cache", "tmp", "out")
    environment = login_environment(HOME=str(home), TMPDIR=str(temporary), XDG_CACHE_HOME=str(cache))
    done = subprocess.run(
        _saving_command(output, launcher), env=environment, cwd=work, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert _files(output / "hf")
    assert _files(output / "saved")
    assert [_files(folder) for folder in (home, work, temporary)] == [[], [], []]
    assert [name for name in _files(cache) if not name.startswith("accelrl")] == []


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 40], ids=["usable", "too-long-for-sockets"])
def test_rays_directory_is_closed_to_other_users_and_removed(short_directory: Path, depth: int) -> None:
    """Also where TMPDIR is so long that it has to be in /tmp."""
    temporary = short_directory / ("d" * depth)
    temporary.mkdir()
    program = """if True:
        import os
        from train.local_ray import LocalRay

        local = LocalRay()
        local.start({"num_cpus": 0, "include_dashboard": False, "logging_level": "error"})
        import ray

        session = ray._private.worker.global_worker.node.get_session_dir_path()
        closed = os.path.dirname(os.path.dirname(session))
        print(closed, oct(os.stat(closed).st_mode & 0o777))
        local.stop()
        print(os.path.exists(closed))
    """
    environment = login_environment(TMPDIR=str(temporary), HOME=str(short_directory))
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    closed, mode, still_there = done.stdout.split()
    assert Path(closed).parent == (temporary if depth == 1 else Path("/tmp"))
    assert mode == "0o700"
    assert still_there == "False"
    assert _files(temporary) == []
    assert not (short_directory / ".ray").exists()


def test_directories_of_killed_runs_are_swept_and_those_of_living_ones_are_not(short_directory: Path) -> None:
    program = """if True:
        import os, sys, tempfile
        from train.local_ray import private_directory

        tempfile.tempdir = sys.argv[1]
        print(private_directory(), flush=True)
        sys.stdin.read()
    """
    command = [sys.executable, "-c", program, str(short_directory)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": REPOSITORY}
    with (
        subprocess.Popen(command, **pipes) as killed,  # type: ignore[call-overload]
        subprocess.Popen(command, **pipes) as living,  # type: ignore[call-overload]
    ):
        left, held = (Path(process.stdout.readline().strip()) for process in (killed, living))
        killed.kill()
        killed.wait()
        (short_directory / "accelrl-of-someone").mkdir()
        (short_directory / "accelrl-link").symlink_to(left)
        sweep(short_directory)
        assert not left.exists()
        kept = [held, short_directory / "accelrl-of-someone", short_directory / "accelrl-link"]
        assert sorted(short_directory.iterdir()) == sorted(kept)
        living.stdin.close()


def test_no_directory_for_ray_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "mkdtemp", Mock(side_effect=OSError(30, "Read-only file system")))
    with pytest.raises(InputError, match="TMPDIR"):
        private_directory()


def _read_only_but_for(folders: Sequence[Path]) -> list[str]:
    """A prefix under which the command can write to ``folders`` (and devices) alone; empty where that cannot be had."""
    if shutil.which("unshare") is None:
        return []
    script = """
        set -e
        for folder in $WRITABLE; do mount --bind $folder $folder; done
        for mounted in $(cut -d ' ' -f 2 /proc/self/mounts); do
            case $mounted in /dev*|/proc*|/sys*) continue;; esac
            case " $WRITABLE " in *" $mounted "*) continue;; esac
            mount -o remount,bind,ro $mounted || true
        done
        exec "$@"
    """
    prefix = ["env", f"WRITABLE={' '.join(map(str, folders))}"]
    prefix += ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "-"]
    probe = folders[0].with_name("probe")
    allowed = subprocess.run([*prefix, "touch", str(folders[0])], capture_output=True, check=False)
    refused = subprocess.run([*prefix, "touch", str(probe)], capture_output=True, check=False)
    return prefix if allowed.returncode == 0 and refused.returncode != 0 else []


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["inline", "ray"])
def test_a_run_needs_no_other_place_to_write_to(short_directory: Path, launcher: str) -> None:
    """All other directories are read-only: the home directory, the working directory, the installation."""
    home, work, *writable = _folders(short_directory, "home", "work", "cache", "tmp", "out")
    prefix = _read_only_but_for(writable)
    if not prefix:
        pytest.skip("this machine lets nobody make a mount namespace")
    cache, temporary, output = writable
    environment = login_environment(HOME=str(home), TMPDIR=str(temporary), XDG_CACHE_HOME=str(cache))
    command = [*prefix, *_saving_command(output, launcher)]
    done = subprocess.run(command, env=environment, cwd=work, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (output / "run" / "report.html").exists()
