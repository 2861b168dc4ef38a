"""What a run goes on from and where it saves, settled and checked before any worker starts."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from uuid import uuid4

from observability import Progress
from samples.errors import InputError
from train.checkpoint.directory import CheckpointDirectory
from train.checkpoint.finding import default_save_directory, find_checkpoint
from train.checkpoint.manifest import Checkpoint
from train.checkpoint.metrics_file import rewind_metrics
from train.checkpoint.settings import check_optimizer, check_seed, check_steps_left, setting_notes
from train.config.run import RunConfig


def save_directory(config: RunConfig, output_dir: Path | None) -> Path | None:
    """Where checkpoints go: ``--save``, or ``checkpoints`` in the output directory; None when nothing is saved."""
    if config.checkpoint.save is not None:
        return Path(config.checkpoint.save).absolute()
    if not config.checkpoint.saves or output_dir is None:
        return None
    return default_save_directory(output_dir.absolute())


def resumed_checkpoint(config: RunConfig) -> Checkpoint | None:
    """The checkpoint that ``--load`` means, if any; its files are not looked at yet.

    Raises InputError where there is none, where it is of a run with another seed, or where nothing is left to do.
    """
    load, output_dir = config.checkpoint.load, config.output.output_dir
    if load is None:
        return None
    resume = find_checkpoint(load, save_directory(config, None if output_dir is None else Path(output_dir)))
    if resume is not None:
        check_seed(resume, config.job.seed)
        check_optimizer(resume, config.optimizer.optimizer)
        check_steps_left(resume, config.job.num_rollout)
    return resume


def resume_facts(resume: Checkpoint | None, config: RunConfig) -> dict[str, str]:
    """What is said at the start, and in config.toml, about where the run begins."""
    if resume is None:
        return {"resumes": "nothing: no checkpoint is there yet"} if config.checkpoint.load == "auto" else {}
    facts = {"resumes": f"{resume.directory}, after step {resume.step + 1}"}
    notes = setting_notes(resume, config)
    return facts | ({"changed since": "; ".join(notes)} if notes else {})


def check_save_directory(directory: Path, resume: Checkpoint | None) -> None:
    """Refuse a directory whose newest checkpoint is not the one that the run goes on from, or that is not writable.

    Otherwise ``--load auto`` and ``--save-keep`` would later take another run's checkpoints for this one's.
    """
    steps = CheckpointDirectory(directory).steps()
    if steps:
        newest = CheckpointDirectory(directory).checkpoint(steps[-1])
        if resume is None:
            raise InputError(
                f"--save {directory}: holds checkpoints of a run already, the newest is {newest.name}; give --load "
                "auto to go on with that run, or another --save"
            )
        if newest.resolve() != resume.directory.resolve():
            raise InputError(
                f"--save {directory}: its newest checkpoint is {newest.name}, and this run goes on from "
                f"{resume.directory}; give another --save, or remove the checkpoints that are not to be gone on from"
            )
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise InputError(f"--save {directory}: {existing} cannot be written to; give a writable directory")


def check_export(directory: Path, run_dir: Path, saves_to: Path | None, resume: Checkpoint | None = None) -> bool:
    """Refuse a ``--save-hf`` that could not be written when training is over, however long that took.

    Returns whether it holds the model that an earlier part of this very run wrote there when it was stopped: the same
    command started again is to replace that.
    """
    from train.megatron.weights.directory import check_target, holds_only_a_model

    target = directory.resolve()
    for what, taken in (("the run's own directory", run_dir), ("--save", saves_to)):
        if taken is not None and (target == taken.resolve() or target in taken.resolve().parents):
            raise InputError(f"--save-hf {directory}: {what} {taken} is in there; give a directory of its own")
    if saves_to is not None and saves_to.resolve() in target.parents:
        raise InputError(f"--save-hf {directory}: is among the checkpoints in {saves_to}; give a directory of its own")
    wrote_there = resume is not None and resume.manifest.config.get("output", {}).get("save_hf") == str(directory)
    if wrote_there and holds_only_a_model(directory):
        return True
    check_target(directory)
    return False


def run_id_of(resume: Checkpoint | None) -> str:
    """The name that a run keeps however often it is interrupted."""
    return uuid4().hex[:12] if resume is None else resume.manifest.run_id


def check_output_directory(run_dir: Path, resume: Checkpoint | None, load: str | None) -> None:
    """Refuse an output directory that holds a run, unless it is the run that goes on."""
    if not _has_steps(run_dir / "metrics.jsonl"):
        return
    if resume is None:
        if load == "auto":  # a run that ended before its first save begins again
            return
        raise InputError(
            f"--output-dir {run_dir} already holds a run (metrics.jsonl): choose another directory, or go on with "
            "that run with --load"
        )
    if _recorded_run_id(run_dir) != resume.manifest.run_id:
        raise InputError(
            f"--output-dir {run_dir} holds another run than the one that {resume.directory} is of; give that run's "
            "directory, or a new one"
        )


def take_up_metrics(run_dir: Path, resume: Checkpoint | None, progress: Progress) -> None:
    """Bring metrics.jsonl and the history back to the step of the checkpoint.

    Where there is none to go on from, metrics that are there are put aside: they are of a run that begins again.
    """
    path = run_dir / "metrics.jsonl"
    if resume is None:
        if _has_steps(path):
            aside = _unused(path.with_name("metrics-before.jsonl"))
            path.rename(aside)
            progress.note(f"the metrics of a run that saved no checkpoint are now in {aside.name}")
        return
    rows, removed = rewind_metrics(path, resume.step)
    for row in rows:
        progress.history.add(row["step"], row)
    if removed:
        steps = "step" if removed == 1 else "steps"
        progress.note(f"metrics.jsonl: {removed} {steps} after the checkpoint removed; they are made again")


def _has_steps(path: Path) -> bool:
    """Whether a metrics.jsonl is of a run that made a step; one that only started leaves an empty file or none."""
    return path.exists() and path.stat().st_size > 0


def _recorded_run_id(run_dir: Path) -> object:
    try:
        document = tomllib.loads((run_dir / "config.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none, or not a run's: then it is not this run's directory
        return None
    facts = document.get("run")
    return facts.get("run_id") if isinstance(facts, dict) else None


def _unused(path: Path) -> Path:
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return candidate
