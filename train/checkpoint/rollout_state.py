"""The rollout side of a checkpoint: its place in the prompts, and the finished groups that no step has trained on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accel.contract import Accelerator
from rollout.collectors.base import CollectorState, WaitingGroup
from samples.errors import InputError
from samples.sample import Sample
from train.checkpoint.errors import CheckpointWriteError
from train.checkpoint.generators import generator_states
from train.checkpoint.manifest import Checkpoint, RolloutState
from train.checkpoint.tensor_files import write_file
from train.replay.rollout_file import plain

GROUPS_FILE = "rollout_groups.jsonl"


def save_rollout_state(directory: Path, state: CollectorState, accelerator: Accelerator | None) -> RolloutState:
    """Write what a collector holds into ``directory``: a line of facts, then a finished group a line.

    A collector that holds nothing between two steps, as the synchronous one, leaves no file. Raises
    CheckpointWriteError when the file cannot be written, or for a sample that JSON cannot hold.
    """
    generators = generator_states(accelerator)
    source = json.loads(_line(state.source, "the prompts' place, or an unfinished response in it,"))
    if state.facts.keys() <= {"mode"} and not state.waiting:
        return RolloutState(source=source, generators=generators)
    try:
        facts = write_file(directory / GROUPS_FILE, _lines(state))
    except OSError as error:
        raise CheckpointWriteError(f"{GROUPS_FILE}: {error.strerror}") from error
    return RolloutState(source=source, generators=generators, files={GROUPS_FILE: facts})


def load_collector_state(checkpoint: Checkpoint) -> CollectorState:
    """What ``save_rollout_state`` wrote. Raises InputError for a file that is not one."""
    rollout = checkpoint.manifest.state.rollout
    if GROUPS_FILE not in rollout.files:
        return CollectorState(rollout.source, {})
    path = checkpoint.directory / GROUPS_FILE
    try:
        with path.open(encoding="utf-8") as file:
            facts = json.loads(file.readline())
            return CollectorState(rollout.source, facts, [_waiting(json.loads(line)) for line in file])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"--load {checkpoint.directory}: {GROUPS_FILE} cannot be read: {error}") from error


def _lines(state: CollectorState) -> Iterator[bytes]:
    yield _line(state.facts, "the collector's facts")
    for entry in state.waiting:
        packed = {"version": entry.version, "first": entry.first.to_dict(), "group": _packed(entry.group)}
        yield _line(packed, f"group {entry.index}")


def _line(value: Any, what: str) -> bytes:
    try:
        return json.dumps(value, default=plain).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise CheckpointWriteError(
            f"{what} holds what JSON cannot ({error}); keep numbers, text, lists and mappings in a sample's metadata"
        ) from error


def _waiting(packed: dict[str, Any]) -> WaitingGroup:
    return WaitingGroup(_unpacked(packed["group"]), packed["version"], Sample.from_dict(packed["first"]))


def _packed(value: Any) -> Any:
    """A group may hold nested lists of samples."""
    return value.to_dict() if isinstance(value, Sample) else [_packed(member) for member in value]


def _unpacked(value: Any) -> Any:
    return Sample.from_dict(value) if isinstance(value, dict) else [_unpacked(member) for member in value]
