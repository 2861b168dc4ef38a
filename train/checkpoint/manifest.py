"""``manifest.json``: everything of a checkpoint that is no tensor, and by its presence the mark of a whole one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from samples.errors import InputError

MANIFEST = "manifest.json"
VERSION = 1


class FileFacts(BaseModel):
    """What a file of the checkpoint has to look like: its size in bytes and the CRC-32 of its content."""

    model_config = ConfigDict(frozen=True)

    bytes: int = Field(ge=0)
    crc32: int = Field(ge=0, lt=2**32)


def _within(files: dict[str, FileFacts]) -> dict[str, FileFacts]:
    """A checkpoint from someone else may name files outside its directory."""
    for name in files:
        if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
            raise ValueError(f"{name!r} is not the name of a file in the checkpoint")
    return files


Files = Annotated[dict[str, FileFacts], AfterValidator(_within)]  # of a checkpoint, by name


class TrainerState(BaseModel):
    """What the trainer wrote: its files by name, and the optimizer steps that the moments have seen.

    Without files on every rank but the first, which writes them.
    """

    model_config = ConfigDict(frozen=True)

    files: Files
    optimizer_steps: int = Field(ge=0, le=2**31)


UNWRITTEN = TrainerState(files={}, optimizer_steps=0)  # of a checkpoint whose trainer's files are still to come


class RolloutState(BaseModel):
    """Where the rollout side stands: its place in the prompts, and the generators that a user's functions draw from."""

    model_config = ConfigDict(frozen=True)

    source: dict[str, Any]
    generators: dict[str, Any]
    files: Files = {}  # of finished groups that no step has trained on, in the overlapped modes


class RunState(BaseModel):
    """Both halves of one step, and the version of the weights that the engine has been given."""

    model_config = ConfigDict(frozen=True)

    weight_version: int = Field(ge=0)
    trainer: TrainerState
    rollout: RolloutState


class ModelFacts(BaseModel):
    """Which model a run began from: its config.json, and checksums that tell its tokenizer and weights from others."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())

    config: dict[str, Any]
    tokenizer: int
    weights: int


class Manifest(BaseModel):
    """The JSON document. ``step`` is the rollout that was trained on last, counted from 0 as in metrics.jsonl.

    All randomness of a run follows from ``config.job.seed`` and the step; ``state.rollout.generators`` are for
    functions of the user's. ``config`` is the whole configuration of the run that saved.
    """

    model_config = ConfigDict(frozen=True, protected_namespaces=())

    format: Literal["accelrl-checkpoint"] = "accelrl-checkpoint"
    version: int = VERSION
    step: int = Field(ge=0)
    run_id: str
    written: str
    optimizer: Literal["adamw", "stateless-adam"] = "adamw"  # the latter saves no moments
    learning_rate: float
    model: ModelFacts
    config: dict[str, Any]
    state: RunState

    def with_trainer(self, trainer: TrainerState) -> Manifest:
        """The same checkpoint once the trainer's files are known."""
        return self.model_copy(update={"state": self.state.model_copy(update={"trainer": trainer})})

    @property
    def files(self) -> dict[str, FileFacts]:
        return self.state.trainer.files | self.state.rollout.files


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on the disk and what it says of itself."""

    directory: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def optimizer_steps(self) -> int:
        return self.manifest.state.trainer.optimizer_steps


def read_manifest(directory: Path, source: str) -> Manifest:
    """The manifest of the checkpoint ``directory``. Raises InputError naming ``source``, the flag that led there."""
    path = directory / MANIFEST
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{source} {directory}: no {MANIFEST} there, so it is no checkpoint of accelrl") from None
    except (OSError, ValueError, RecursionError) as error:  # RecursionError: brackets nested without end
        raise InputError(f"{source} {directory}: {MANIFEST} cannot be read ({error}); use another") from error
    version = document.get("version") if isinstance(document, dict) else None
    if isinstance(version, int) and version > VERSION:
        raise InputError(
            f"{source} {directory}: the checkpoint has format version {version}, this accelrl reads up to {VERSION}; "
            "use the accelrl that wrote it, or a newer one"
        )
    try:
        manifest = Manifest.model_validate(document)
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"])) or "the document"
        raise InputError(
            f"{source} {directory}: {MANIFEST} is not a checkpoint's: {where}: {error.errors()[0]['msg']}"
        ) from error
    if not manifest.state.trainer.files:
        raise InputError(f"{source} {directory}: {MANIFEST} is not a checkpoint's: state.trainer.files: names no file")
    wrong = _what_is_wrong(manifest.config)
    if wrong is not None:
        raise InputError(f"{source} {directory}: {MANIFEST} is not a checkpoint's: config: {wrong}")
    return manifest


def _what_is_wrong(config: dict[str, Any]) -> str | None:
    """What a resume looks up of the run that saved, and does not find there."""
    if any(not isinstance(section, dict) for section in config.values()):
        return "every section must be a mapping"
    missing = [name for name in ("seed", "num_rollout") if not isinstance(config.get("job", {}).get(name), int)]
    return f"job.{missing[0]} must be a whole number" if missing else None
