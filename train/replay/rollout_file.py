"""One recorded rollout: a JSON Lines file whose first line says what it is, and then a sample a line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError, field_validator

from samples.errors import InputError
from samples.sample import Group, Sample
from train.checkpoint.manifest import ModelFacts
from train.replay.sample_types import check_sample

FORMAT: Literal["accelrl-rollout"] = "accelrl-rollout"
VERSION = 1
COMPARED = ("job", "model", "rollout", "reward", "algorithm", "optimizer", "batch", "parallel")


class RolloutHeader(BaseModel):
    """The first line. ``group_sizes`` cuts the samples into groups; ``config`` is the recording run's, whole."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())

    format: Literal["accelrl-rollout"] = FORMAT
    version: int = VERSION
    rollout_id: int
    group_sizes: list[NonNegativeInt]
    model: ModelFacts
    config: dict[str, Any]
    metrics: dict[str, float]

    @field_validator("config")
    @classmethod
    def _is_a_configuration(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Has the sections that a replay compares itself with."""
        missing = [name for name in COMPARED if not isinstance(config.get(name), dict)]
        if missing:
            raise ValueError(f"has no section {missing[0]}")
        return config


def rollout_path(directory: Path, rollout_id: int) -> Path:
    return directory / f"rollout_{rollout_id:06d}.jsonl"


def recorded_ids(directory: Path) -> list[int]:
    """The rollouts that a directory holds, in order."""
    stems = (path.stem.removeprefix("rollout_") for path in directory.glob("rollout_*.jsonl"))
    return sorted(int(stem) for stem in stems if stem.isdecimal())


def write_rollout(path: Path, header: RolloutHeader, groups: Sequence[Group]) -> None:
    """Write a rollout; the file appears whole or not at all. Numbers read back as exactly what they were.

    Raises InputError when the file cannot be written, or for a sample that JSON cannot hold.
    """
    unfinished = path.with_name(path.name + ".part")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            file.write(json.dumps(header.model_dump()) + "\n")
            for group in groups:
                for sample in group:
                    file.write(_line(sample) + "\n")
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise InputError(f"--save-debug-rollout-data: {path} cannot be written: {error.strerror}") from error
    except InputError:
        unfinished.unlink(missing_ok=True)
        raise


def read_header(path: Path) -> RolloutHeader:
    with _opened(path) as file:
        return _header(path, file.readline())


def read_rollout(path: Path) -> tuple[RolloutHeader, list[Group]]:
    """Header and groups. Raises InputError, naming file and line, for a file that is not a whole recorded rollout."""
    with _opened(path) as file:
        header = _header(path, file.readline())
        samples = [_sample(path, number, line) for number, line in enumerate(file, start=2)]
    if len(samples) != sum(header.group_sizes):
        raise InputError(
            f"{path}: holds {len(samples)} samples where its first line says {sum(header.group_sizes)}; the file is "
            "not whole, record it again"
        )
    rest: Iterator[Sample] = iter(samples)
    return header, [list(islice(rest, size)) for size in header.group_sizes]


def _opened(path: Path) -> Any:
    try:
        return path.open(encoding="utf-8", errors="surrogateescape")  # other bytes are no JSON, and said to be none
    except OSError as error:
        raise InputError(f"--load-debug-rollout-data: {path} cannot be read: {error.strerror}") from error


def _header(path: Path, line: str) -> RolloutHeader:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise InputError(f"{path}: is no recorded rollout; --save-debug-rollout-data writes those")
    if document.get("version") != VERSION:
        raise InputError(
            f"{path}: has format version {document.get('version')}, this accelrl reads {VERSION}; record it again"
        )
    try:
        return RolloutHeader.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(f"{path}, line 1: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _sample(path: Path, number: int, line: str) -> Sample:
    try:
        values = json.loads(line)
        check_sample(values)
        return Sample.from_dict(values)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InputError(f"{path}, line {number}: not a sample of this accelrl ({error}); record it again") from error


def _line(sample: Sample) -> str:
    try:
        return json.dumps(sample.to_dict(), default=plain)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"--save-debug-rollout-data: sample {sample.index} holds what JSON cannot ({error}); keep numbers, text, "
            "lists and mappings in a sample's metadata"
        ) from error


def plain(value: object) -> Any:
    """Arrays that hooks left in a sample, as lists of the same numbers."""
    if isinstance(value, np.ndarray | np.generic | torch.Tensor):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__}")
