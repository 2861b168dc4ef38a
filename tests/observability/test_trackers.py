import errno
import json
import math
import os

import numpy as np
import pytest
import torch

from observability.trackers import JsonlTracker, MultiTracker, step_record


def strict_lines(path):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_each_step_is_one_line_that_others_can_read_at_once(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log(0, {"rollout/raw_reward": 0.5, "rollout/num_samples": 8})
    assert strict_lines(path) == [{"step": 0, "rollout/raw_reward": 0.5, "rollout/num_samples": 8}]
    tracker.log(1, {"train/loss": np.float32(0.25), "train/tokens": np.int64(3), "train/kl": torch.tensor(1.5)})
    assert strict_lines(path)[1] == {"step": 1, "train/loss": 0.25, "train/tokens": 3, "train/kl": 1.5}
    tracker.close()
    tracker.close()


def test_values_that_are_not_finite_are_null_and_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path)
    tracker.log(4, {"train/loss": math.nan, "train/grad_norm": math.inf, "train/kl": -math.inf, "train/lr": 0.1})
    tracker.close()
    assert strict_lines(path) == [
        {
            "step": 4,
            "train/loss": None,
            "train/grad_norm": None,
            "train/kl": None,
            "train/lr": 0.1,
            "nonfinite": {"train/loss": "nan", "train/grad_norm": "inf", "train/kl": "-inf"},
        }
    ]


def test_integers_and_booleans_stay_integers():
    assert json.dumps(step_record(0, {"n": 3, "on": True})) == '{"step": 0, "n": 3, "on": 1}'


def test_floats_come_back_exactly():
    value = 0.1 + 0.2
    assert json.loads(json.dumps(step_record(0, {"x": value})))["x"] == value


@pytest.mark.parametrize("value", ["0.5", None, b"1"])
def test_what_is_no_number_is_refused_by_name(value):
    with pytest.raises(TypeError, match="metric 'train/loss' must be a number"):
        step_record(0, {"train/loss": value})


@pytest.mark.parametrize("key", ["step", "nonfinite"])
def test_the_records_own_names_are_not_metrics(key):
    with pytest.raises(ValueError, match=key):
        step_record(0, {key: 1.0})


def test_opening_again_appends(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in range(2):
        tracker = JsonlTracker(path)
        tracker.log(step, {"x": step})
        tracker.close()
    assert [line["step"] for line in strict_lines(path)] == [0, 1]


@pytest.mark.parametrize("cut", ['{"step": 1, "x"', '{"step": 1, "x": 1}', "y" * 200_000])
@pytest.mark.parametrize("whole", ["", '{"step": 0, "x": 0}\n'])
def test_a_last_line_cut_off_by_a_kill_is_removed_on_opening(tmp_path, whole, cut):
    path = tmp_path / "metrics.jsonl"
    path.write_text(whole + cut)
    tracker = JsonlTracker(path)
    tracker.log(7, {"x": 7})
    tracker.close()
    assert [line["step"] for line in strict_lines(path)] == ([0, 7] if whole else [7])


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_an_error_that_names_the_file_and_the_step(monkeypatch):
    monkeypatch.setattr("observability.trackers._drop_unfinished_line", lambda path: None)
    tracker = JsonlTracker("/dev/full")
    with pytest.raises(OSError, match=r"step 3.*/dev/full") as full:
        tracker.log(3, {"x": 1.0})
    assert full.value.errno == errno.ENOSPC


class Recorder:
    def __init__(self, fails=False):
        self.seen, self.closed, self.fails = [], False, fails

    def log(self, step, metrics):
        if self.fails:
            raise OSError("no network")
        self.seen.append((step, dict(metrics)))

    def close(self):
        self.closed = True
        if self.fails:
            raise OSError("no network")


def test_several_trackers_get_the_same():
    trackers = [Recorder(), Recorder()]
    both = MultiTracker(trackers)
    both.log(2, {"x": 1.0})
    both.close()
    assert all(tracker.seen == [(2, {"x": 1.0})] and tracker.closed for tracker in trackers)


def test_one_failing_tracker_does_not_cost_the_others_their_step_and_is_reported():
    failing, other = Recorder(fails=True), Recorder()
    both = MultiTracker([failing, other])
    with pytest.raises(OSError, match="no network"):
        both.log(2, {"x": 1.0})
    with pytest.raises(OSError, match="no network"):
        both.close()
    assert other.seen == [(2, {"x": 1.0})]
    assert other.closed
