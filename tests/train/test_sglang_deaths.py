"""Runs whose servers and router are killed in the middle of a rollout, and a run on a server of somebody else."""

from __future__ import annotations

import json
import threading
import time

import pytest

from rollout.engines.errors import EngineError
from rollout.event_loop import EventLoopThread
from tests.rollout.sglang_cases import MARKS, kill_program, servers
from tests.train.sglang_runs import Comparison, run_watched
from train.example import write_example
from train.replay.rollout_file import read_rollout, recorded_ids, rollout_path

pytestmark = [*MARKS, pytest.mark.nightly]  # some minutes of processor time each

GROUPS, SIZE = 12, 8
FLAGS = (
    *("--rollout-batch-size", str(GROUPS), "--n-samples-per-prompt", str(SIZE), "--global-batch-size", "96"),
    *("--dynamic-sampling-filter-path", "none", "--rollout-max-response-len", "24"),
)
HISTORY = (
    r"(?s)actor-0-regular-1 died, and --max-engine-restarts 1 are used up\. What happened before: .*"
    r"server actor-0-regular-0 died; .*server actor-0-regular-0 is back; .*the router died"
)


def metrics_of(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def kill_during_rollout(run, process) -> None:
    """kill -9 once requests are under way; on a thread of its own, since the run waits for its answers."""

    def wait_and_kill():
        while len(run.engine._requests().in_flight) < GROUPS * SIZE // 2:
            time.sleep(0.002)
        kill_program(process)

    threading.Thread(target=wait_and_kill, daemon=True).start()


@pytest.mark.parametrize("channel", ["disk", "tensor", "distributed"])
def test_a_run_goes_on_when_a_server_and_then_the_router_are_killed_and_gives_up_after_its_restarts(
    channel, tmp_path, monkeypatch, record_property
):
    """Step 1: one of two servers; step 3: the router; step 5: the other server, and no restart is left."""
    run_dir, recorded = tmp_path / "run", tmp_path / "recorded"
    monkeypatch.setenv("ACCELRL_CPU_DEVICES", "3")
    compare = Comparison(last=5)
    restored: list[list[str]] = []

    def kill(run, step):
        if step in (1, 3, 5):
            engine = run.engine
            victims = {1: engine.servers[0], 3: engine.router, 5: engine.servers[1]}
            kill_during_rollout(run, victims[step]._process)

    async def versions_once_back(run):
        async with run.engine._running().lock:  # held until the server is back
            return [await server.weight_version() for server in run.engine.servers]

    def look(run, version):
        if version == 2:  # the update after step 1: what the restarted server has been given before
            deadline = time.monotonic() + 300
            while not run.engine._recovery.restarts and time.monotonic() < deadline:
                time.sleep(0.05)
            restored.append(run.do(versions_once_back(run)))

    with pytest.raises(EngineError, match=HISTORY):
        run_watched(
            monkeypatch,
            run_dir,
            *("--num-rollout", "8", "--rollout-num-gpus", "2", "--weight-update-channel", channel, *FLAGS),
            *("--max-engine-restarts", "1", "--save-debug-rollout-data", str(recorded)),
            before_step=kill,
            before_update=look,
            after_update=compare,
        )
    assert restored == [["1", "1"]]
    assert compare.versions == list(range(6))
    steps = metrics_of(run_dir)
    assert [step["engine/restarts"] for step in steps][2:] == [1.0] * (len(steps) - 2)
    assert [step["engine/router_restarts"] for step in steps][:3] == [0.0] * 3
    assert [step["engine/router_restarts"] for step in steps][4:] == [1.0] * (len(steps) - 4)
    assert len(steps) == 5
    assert recorded_ids(recorded) == list(range(5))
    for step in range(5):
        groups = read_rollout(rollout_path(recorded, step))[1]
        indices = [sample.index for group in groups for sample in group]
        assert indices == list(range(step * GROUPS * SIZE, (step + 1) * GROUPS * SIZE))
        assert all(sample.response_length == len(sample.rollout_log_probs) > 0 for group in groups for sample in group)
        assert {sample.weight_version for group in groups for sample in group} == {step}
    record_property("table", f"{channel}: {[(s['engine/restarts'], s['engine/router_restarts']) for s in steps]}")


@pytest.mark.parametrize("channel", ["distributed", "tensor"])
def test_an_update_in_which_a_server_dies_is_made_again_with_the_server_back(channel, tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    monkeypatch.setenv("ACCELRL_CPU_DEVICES", "3")
    compare = Comparison(last=3)

    def kill_at_the_first_bucket(run, version):
        if version == 2:
            of_run = run.engine._channel
            send = of_run.send

            async def kill_and_send(tensors):
                of_run.send = send
                kill_program(run.engine.servers[0]._process)
                await send(tensors)

            of_run.send = kill_and_send

    status = run_watched(
        monkeypatch,
        run_dir,
        *("--num-rollout", "3", "--rollout-num-gpus", "2", "--weight-update-channel", channel, *FLAGS),
        *("--update-weight-buffer-size", "100000"),
        before_update=kill_at_the_first_bucket,
        after_update=compare,
    )
    assert status == 0
    assert compare.versions == [0, 1, 2, 3]
    steps = metrics_of(run_dir)
    assert [step["perf/update_weights_retries"] for step in steps] == [0.0, 1.0, 1.0]
    assert steps[-1]["engine/restarts"] == 1.0


def test_a_server_started_by_hand_is_trained_with_and_left_running(tmp_path, monkeypatch):
    model_dir = write_example(tmp_path / "example", 0).hf_checkpoint
    loop = EventLoopThread("by-hand")
    by_hand = servers(model_dir, tmp_path / "by_hand")
    loop.run(by_hand.start())
    (server,) = by_hand.servers
    try:
        for channel in ("disk", "tensor", "distributed"):
            compare = Comparison(last=2)
            status = run_watched(
                monkeypatch,
                tmp_path / channel,
                *("--num-rollout", "2", "--weight-update-channel", channel, *FLAGS, "--rollout-max-context-len", "64"),
                *("--rollout-external-engine-addrs", server.url.removeprefix("http://")),
                after_update=compare,
            )
            assert status == 0
            assert compare.versions == [0, 1, 2]
            assert loop.run(server.is_healthy(30))
            assert loop.run(server.weight_version()) == "2"
            assert {path.name for path in (tmp_path / channel / "servers").iterdir()} >= {"router-actor.log"}
    finally:
        loop.run(by_hand.stop())
        loop.close()
