import json
import math
import os
import socket
import subprocess
import sys

import pytest

from observability.trackers import JsonlTracker, MultiTracker
from observability.wandb_tracker import choose_mode
from tests.wandb_files import history


@pytest.mark.parametrize("mode", ["online", "offline", "disabled"])
def test_the_environment_decides_the_mode(mode):
    assert choose_mode({"WANDB_MODE": mode}) == (mode, f"WANDB_MODE={mode}")


def test_without_a_login_it_stays_offline_and_never_asks(tmp_path):
    mode, why = choose_mode({"NETRC": str(tmp_path / "none")})
    assert mode == "offline"
    assert "wandb login" in why


@pytest.fixture
def server(monkeypatch):
    for variable in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(variable, raising=False)
        monkeypatch.delenv(variable.upper(), raising=False)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


@pytest.mark.parametrize("login", ["key", "netrc"])
def test_with_a_login_and_a_server_it_goes_online_and_without_one_offline(tmp_path, server, login):
    url = f"http://127.0.0.1:{server.getsockname()[1]}"
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login user password key\n")
    environment = {"WANDB_BASE_URL": url}
    environment |= {"WANDB_API_KEY": "key"} if login == "key" else {"NETRC": str(tmp_path / "netrc")}
    assert choose_mode(environment)[0] == "online"
    server.close()
    assert choose_mode(environment) == ("offline", "127.0.0.1 cannot be reached")


def test_a_proxy_stands_for_the_server(monkeypatch, server):
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{server.getsockname()[1]}")
    environment = {"WANDB_API_KEY": "key", "WANDB_BASE_URL": "https://wandb.invalid"}
    assert choose_mode(environment)[0] == "online"


RUN = """
import sys
from pathlib import Path
from observability.background import BackgroundTracker
from observability.wandb_tracker import WandbTracker

run_dir = Path(sys.argv[1])
opened = lambda: WandbTracker(run_dir, {"job": {"seed": 3}}, project="tests", name="a run", notify=print)
tracker = BackgroundTracker("wandb", opened, print)
for step in range(20):
    tracker.log(step, {"train/loss": 1 / (step + 3), "train/tokens": step, "rollout/raw_reward": float("nan")})
tracker.close()
"""


@pytest.mark.slow
def test_an_offline_run_holds_the_values_of_metrics_jsonl_and_nothing_about_the_machine(tmp_path):
    pytest.importorskip("wandb")
    secret = "0123456789" * 4
    environment = os.environ | {"WANDB_MODE": "offline", "WANDB_API_KEY": secret, "HOME": str(tmp_path / "home")}
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment["TMPDIR"] = str(temporary)
    for variable in ("XDG_CACHE_HOME", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        environment.pop(variable, None)
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "wandb sync" in done.stdout
    assert [*temporary.iterdir(), *(tmp_path / "home").rglob("*")] == []
    assert not list((tmp_path / "wandb").glob("tmp*")), "removed when the process ends"
    assert done.stderr == ""
    tracker = MultiTracker([JsonlTracker(tmp_path / "metrics.jsonl")])
    for step in range(20):
        tracker.log(step, {"train/loss": 1 / (step + 3), "train/tokens": step, "rollout/raw_reward": math.nan})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (path,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    rows, kinds = history(path)
    assert len(rows) == len(lines) == 20
    for line, row in zip(lines, rows, strict=True):
        assert row["_step"] == line["step"]
        assert row["train/loss"] == line["train/loss"]
        assert row["train/tokens"] == line["train/tokens"]
        assert math.isnan(row["rollout/raw_reward"])
    assert not {"environment", "stats", "output", "output_raw"} & kinds
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or secret.encode() not in file.read_bytes()
