"""Recorded rollouts read back as what they were, and a replay refuses what would not give the recorded numbers."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout.collectors.output import RolloutOutput
from samples.errors import InputError
from samples.sample import Group, Sample, Status
from train.config.run import RunConfig
from train.config.settings import build
from train.example import write_example
from train.replay.recorder import RolloutRecorder, check_recording_directory
from train.replay.role import ReplayRole, changed_settings, check_recording
from train.replay.rollout_file import read_header, read_rollout, recorded_ids, rollout_path

_float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
_text = st.text(max_size=8)
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def _samples(draw: st.DrawFn) -> Sample:
    length = draw(st.integers(0, 4))
    return Sample(
        prompt=draw(_text | st.lists(st.fixed_dictionaries({"role": _text, "content": _text}), max_size=2)),
        tokens=draw(st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length + 3)),
        response=draw(_text),
        response_length=length,
        label=draw(_json),
        reward=draw(st.none() | st.floats(allow_nan=False) | st.dictionaries(_text, st.floats(allow_nan=False))),
        rollout_log_probs=draw(st.lists(_float32, min_size=length, max_size=length)),
        rollout_kept_token_ids=draw(
            st.none() | st.lists(st.lists(st.integers(0, 9)), min_size=length, max_size=length)
        ),
        status=draw(st.sampled_from(Status)),
        metadata=draw(st.dictionaries(_text, _json, max_size=3)),
    )


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_example(tmp_path_factory.mktemp("example"), seed=0).hf_checkpoint


def _config(model_dir: Path, **values: Any) -> RunConfig:
    return build({"hf_checkpoint": str(model_dir), "num_rollout": 2, **values})


def _record(directory: Path, config: RunConfig, *groups: Group, rollout_id: int = 0, **metrics: float) -> Path:
    RolloutRecorder(directory, config).record(RolloutOutput(rollout_id, list(groups), metrics))
    return rollout_path(directory, rollout_id)


def _pair(first: int) -> Group:
    return [
        Sample(
            tokens=[3, 4, 5, 6],
            response="56",
            response_length=2,
            reward=float(place),
            rollout_log_probs=[-0.5, -1.5],
            status=Status.COMPLETED,
            index=first + place,
            group_index=first,
        )
        for place in range(2)
    ]


@given(groups=st.lists(st.lists(_samples(), max_size=3), max_size=3))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_recorded_rollout_reads_back_as_it_was(tmp_path: Path, model_dir: Path, groups: list[Group]) -> None:
    path = _record(tmp_path, _config(model_dir), *groups)
    assert read_rollout(path)[1] == groups


def test_numbers_that_are_not_finite_read_back_too(tmp_path: Path, model_dir: Path) -> None:
    path = _record(tmp_path, _config(model_dir), [Sample(reward=math.inf, rollout_log_probs=[math.nan])], x=math.nan)
    header, [[sample]] = read_rollout(path)
    assert sample.reward == math.inf
    assert math.isnan(sample.rollout_log_probs[0])
    assert math.isnan(header.metrics["x"])


def test_arrays_that_a_hook_left_in_a_sample_are_recorded_as_lists(tmp_path: Path, model_dir: Path) -> None:
    sample = Sample(tokens=np.array([1, 2]), loss_mask=torch.tensor([1]), metadata={"x": np.float32(0.1)})  # type: ignore[arg-type]
    path = _record(tmp_path, _config(model_dir), [sample])
    [[read]] = read_rollout(path)[1]
    assert (read.tokens, read.loss_mask) == ([1, 2], [1])
    assert np.float32(read.metadata["x"]) == np.float32(0.1)


def test_what_json_cannot_hold_is_refused_and_leaves_no_file(tmp_path: Path, model_dir: Path) -> None:
    with pytest.raises(InputError, match=r"sample 7 .*a set.*metadata"):
        _record(tmp_path, _config(model_dir), [Sample(index=7, metadata={"seen": {1, 2}})])
    assert list(tmp_path.iterdir()) == []


def test_a_replay_hands_over_the_batch_and_metrics_of_the_recording(tmp_path: Path, model_dir: Path) -> None:
    metrics = {"rollout/raw_reward": 0.5, "perf/rollout_time": 123.0}
    _record(tmp_path, _config(model_dir), _pair(0), _pair(2), **metrics)
    replay = ReplayRole(_config(model_dir, load_debug_rollout_data=str(tmp_path)))
    batch, output = replay.rollout(0)
    replayed, transcripts = output.metrics, output.transcripts
    assert batch is not None
    assert batch.sample_indices.tolist() == [0, 1, 2, 3]
    assert batch.group_ids.tolist() == [0, 0, 1, 1]
    assert replayed["rollout/raw_reward"] == 0.5
    assert replayed["perf/rollout_time"] != 123.0
    assert transcripts


def test_a_rollout_that_left_nothing_to_train_on_is_replayed_as_such(tmp_path: Path, model_dir: Path) -> None:
    _record(tmp_path, _config(model_dir))
    assert ReplayRole(_config(model_dir, load_debug_rollout_data=str(tmp_path))).rollout(0)[0] is None


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda lines: lines[:-1], "holds 3 samples where its first line says 4"),
        (lambda lines: [*lines[:2], lines[2][:40], *lines[3:]], "line 3"),
        (lambda lines: [*lines[:2], '{"prompt": "x", "colour": 1, "status": "pending"}', *lines[3:]], "line 3.*colour"),
        (lambda lines: lines[1:], "is no recorded rollout"),
        (lambda lines: [], "is no recorded rollout"),
        (lambda lines: [lines[0].replace('"version": 1', '"version": 9', 1), *lines[1:]], "version 9"),
        (lambda lines: [lines[0].replace('"rollout_id": 0', '"rollout_id": 5', 1), *lines[1:]], "holds rollout 5"),
    ],
    ids=["cut off", "broken line", "unknown field", "no header", "empty", "another format", "renamed"],
)
def test_a_damaged_file_is_named_with_what_is_wrong(tmp_path: Path, model_dir: Path, damage: Any, says: str) -> None:
    path = _record(tmp_path, _config(model_dir), _pair(0), _pair(2))
    path.write_text("\n".join(damage(path.read_text().splitlines())))
    replay = ReplayRole(_config(model_dir, load_debug_rollout_data=str(tmp_path)))
    with pytest.raises(InputError, match=says) as refused:
        replay.rollout(0)
    assert "rollout_000000.jsonl" in str(refused.value)


FIELDS = {
    "tokens": "abc", "prompt": 5, "response": None, "index": "x", "group_index": {"a": 1}, "source": ["a"],
    "loss_mask": [[1]], "metadata": 3, "rollout_kept_token_ids": [1], "reward": "x",
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), FIELDS.items(), ids=FIELDS.keys())
def test_a_field_of_another_type_is_named(tmp_path: Path, model_dir: Path, name: str, value: object) -> None:
    path = _record(tmp_path, _config(model_dir), _pair(0), _pair(2))
    lines = path.read_text().splitlines()
    lines[2] = json.dumps(json.loads(lines[2]) | {name: value})
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(InputError, match=f"line 3: .*{name} is not"):
        read_rollout(path)


HEADERS: dict[str, bytes] = {
    "a pickle": pickle.dumps({"samples": [b"\xff" * 50]}),
    "other bytes": b"\xff\xfe\x80" * 100,
    "endless brackets": b"[" * 100_000,
    "nothing": b"",
}


@pytest.mark.parametrize("content", HEADERS.values(), ids=HEADERS.keys())
def test_what_is_no_recording_is_said_to_be_none(tmp_path: Path, model_dir: Path, content: bytes) -> None:
    (tmp_path / "rollout_000000.jsonl").write_bytes(content)
    with pytest.raises(InputError, match="is no recorded rollout"):
        check_recording(_config(model_dir, load_debug_rollout_data=str(tmp_path)))


@pytest.mark.parametrize(
    ("values", "says"),
    [({"config": {}}, "config: .*no section job"), ({"group_sizes": [-1, 5]}, "group_sizes.0: .*greater than")],
    ids=["config", "sizes"],
)
def test_a_first_line_from_someone_else(tmp_path: Path, model_dir: Path, values: Any, says: str) -> None:
    path = _record(tmp_path, _config(model_dir), _pair(0), _pair(2))
    first, *rest = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps(json.loads(first) | values), *rest]) + "\n")
    with pytest.raises(InputError, match=f"line 1: {says}"):
        check_recording(_config(model_dir, load_debug_rollout_data=str(tmp_path)))


def test_a_replay_from_a_checkpoint_needs_the_rollouts_after_it_alone(tmp_path: Path, model_dir: Path) -> None:
    _record(tmp_path, _config(model_dir), _pair(0), rollout_id=3)
    _record(tmp_path, _config(model_dir), _pair(2), rollout_id=4)
    config = _config(model_dir, load_debug_rollout_data=str(tmp_path), num_rollout=9)
    assert check_recording(config, 3)[0] == 5
    with pytest.raises(InputError, match="needs every rollout from 0 on"):
        check_recording(config)


def test_a_rollout_of_another_model_is_refused_naming_both(tmp_path: Path, model_dir: Path) -> None:
    _record(tmp_path / "recording", _config(model_dir), _pair(0))
    other = write_example(tmp_path / "other", seed=1).hf_checkpoint
    with pytest.raises(InputError, match="the run began from other weights") as refused:
        check_recording(_config(other, load_debug_rollout_data=str(tmp_path / "recording")))
    assert str(model_dir) in str(refused.value)
    assert str(other) in str(refused.value)
    described = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**described, "hidden_size": 32}))
    with pytest.raises(InputError, match="hidden_size is 64 there and 32 here"):
        check_recording(_config(other, load_debug_rollout_data=str(tmp_path / "recording")))


def test_another_temperature_is_refused(tmp_path: Path, model_dir: Path) -> None:
    _record(tmp_path, _config(model_dir, rollout_temperature=0.7), _pair(0))
    with pytest.raises(InputError, match=r"--rollout-temperature 1\.0.*recorded with 0\.7"):
        check_recording(_config(model_dir, load_debug_rollout_data=str(tmp_path)))


def test_a_recording_shorter_than_the_run_is_replayed_to_its_end(tmp_path: Path, model_dir: Path) -> None:
    for rollout_id in range(3):
        _record(tmp_path, _config(model_dir), _pair(0), rollout_id=rollout_id)
    replayed = {
        n: check_recording(_config(model_dir, load_debug_rollout_data=str(tmp_path), num_rollout=n))[0]
        for n in (2, 3, 9)
    }
    assert replayed == {2: 2, 3: 3, 9: 3}


def test_a_gap_in_a_recording_is_refused(tmp_path: Path, model_dir: Path) -> None:
    for rollout_id in (0, 1, 3):
        _record(tmp_path, _config(model_dir), _pair(0), rollout_id=rollout_id)
    with pytest.raises(InputError, match=r"rollout_000002\.jsonl is missing"):
        check_recording(_config(model_dir, load_debug_rollout_data=str(tmp_path), num_rollout=4))
    assert check_recording(_config(model_dir, load_debug_rollout_data=str(tmp_path)))[0] == 2


def test_a_directory_without_rollouts_is_refused(tmp_path: Path, model_dir: Path) -> None:
    with pytest.raises(InputError, match=r"holds no rollout_000000\.jsonl"):
        check_recording(_config(model_dir, load_debug_rollout_data=str(tmp_path)))


def test_settings_of_training_that_changed_are_told(tmp_path: Path, model_dir: Path) -> None:
    path = _record(tmp_path, _config(model_dir, lr=1e-3), _pair(0))
    recorded = read_header(path).config
    assert changed_settings(recorded, _config(model_dir, lr=1e-3, progress="off")) == []
    assert changed_settings(recorded, _config(model_dir, lr=5e-4, seed=4)) == ["--seed 0 -> 4", "--lr 0.001 -> 0.0005"]


def test_recordings_are_not_written_over(tmp_path: Path, model_dir: Path) -> None:
    _record(tmp_path, _config(model_dir), _pair(0))
    _record(tmp_path, _config(model_dir), _pair(0), rollout_id=12)
    assert recorded_ids(tmp_path) == [0, 12]
    with pytest.raises(InputError, match="0 to 12"):
        check_recording_directory(tmp_path)
    check_recording_directory(tmp_path, first_rollout=5)  # a resumed run writes its own again
    check_recording_directory(tmp_path, begins_again=True)  # these are put aside
