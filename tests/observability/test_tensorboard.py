import json
import math
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from observability.tensorboard import TensorBoardTracker
from observability.trackers import JsonlTracker, MultiTracker


def scalars(directory):
    """{tag: [(step, value), ...]} as TensorBoard's own reader finds them."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = reader.EventAccumulator(str(directory), size_guidance={reader.SCALARS: 0})
    accumulator.Reload()
    return {
        tag: [(event.step, event.value) for event in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()[reader.SCALARS]
    }


def test_event_files_hold_the_values_of_metrics_jsonl(tmp_path):
    tracker = MultiTracker([JsonlTracker(tmp_path / "metrics.jsonl"), TensorBoardTracker(tmp_path / "tensorboard")])
    random = np.random.default_rng(0)
    for step in range(300):
        metrics = {"rollout/raw_reward": random.normal(), "train/loss": random.normal() * 1e-6, "train/tokens": step}
        tracker.log(step, metrics | ({"eval/gsm8k": step / 7} if step % 100 == 0 else {}))
    tracker.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    expected = {}
    for line in lines:
        for key in line.keys() - {"step"}:
            expected.setdefault(key, []).append((line["step"], float(np.float32(line[key]))))
    assert scalars(tmp_path / "tensorboard") == expected


def test_values_beyond_a_32_bit_float_and_not_finite_ones_are_kept_as_such(tmp_path):
    tracker = TensorBoardTracker(tmp_path)
    tracker.log(0, {"a": math.nan, "b": math.inf, "c": -1e300, "d": 2**40, "e": True, "f": np.float64(0.1)})
    tracker.close()
    found = {tag: values[0][1] for tag, values in scalars(tmp_path).items()}
    assert math.isnan(found.pop("a"))
    assert found == {"b": math.inf, "c": -math.inf, "d": float(2**40), "e": 1.0, "f": float(np.float32(0.1))}


def test_each_step_can_be_read_before_the_file_is_closed(tmp_path):
    tracker = TensorBoardTracker(tmp_path)
    for step in (0, 1, 2**33):
        tracker.log(step, {"x": step})
        assert scalars(tmp_path)["x"][-1][0] == step
    tracker.close()
    tracker.close()


def test_a_resumed_run_replaces_the_steps_that_it_makes_again(tmp_path):
    for steps in (range(6), range(4, 8)):
        tracker = TensorBoardTracker(tmp_path)
        for step in steps:
            tracker.log(step, {"x": step + 100 * (steps.start > 0)})
        tracker.close()
    assert scalars(tmp_path)["x"] == [(0, 0), (1, 1), (2, 2), (3, 3), (4, 104), (5, 105), (6, 106), (7, 107)]


def test_what_is_no_number_is_refused_by_name(tmp_path):
    with pytest.raises(TypeError, match="metric 'train/loss' must be a number"):
        TensorBoardTracker(tmp_path).log(0, {"train/loss": "0.5"})


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_an_error_that_names_the_file(tmp_path):
    tracker = TensorBoardTracker(tmp_path)
    tracker._file.close()
    tracker._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115 - closed by the tracker
    with pytest.raises(OSError, match="tfevents"):
        tracker.log(0, {"x": 1.0})
    tracker.close()


@settings(deadline=None, max_examples=50)
@given(st.dictionaries(st.text(max_size=40).filter(lambda key: key not in ("step", "nonfinite")),
                       st.floats(width=32), min_size=1, max_size=5), st.integers(0, 2**60))  # fmt: skip
def test_any_name_and_value_is_a_message_that_tensorboard_reads(tmp_path_factory, metrics, step):
    event_pb2 = pytest.importorskip("tensorboard.compat.proto.event_pb2")
    records = pytest.importorskip("tensorboard.compat.tensorflow_stub.pywrap_tensorflow")
    tracker = TensorBoardTracker(tmp_path_factory.mktemp("events"))
    metrics = {key.encode("utf-8", "replace").decode(): value for key, value in metrics.items()}
    tracker.log(step, metrics)
    tracker.close()
    reader = records.PyRecordReader_New(str(tracker.path))
    reader.GetNext()
    reader.GetNext()
    event = event_pb2.Event.FromString(reader.record())
    assert event.step == step
    assert [value.tag for value in event.summary.value] == list(metrics)
    np.testing.assert_array_equal([v.simple_value for v in event.summary.value], list(metrics.values()))
