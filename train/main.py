"""The ``train`` command."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from train.cli import run_guarded
from train.collection import collection_paused
from train.config import cli
from train.config.run import RunConfig

if TYPE_CHECKING:
    from observability import Progress
    from train.checkpoint.saver import CheckpointSaver
    from train.loop import EvaluationPlan, Runtime
    from train.prepare import PreparedRun


def main(argv: list[str] | None = None) -> int:
    """Run ``accelrl train`` with ``argv`` (default: the process's own); returns the exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    command = arguments[0] if arguments else ""
    if command in ("inspect", "export"):
        from train import exporting, inspecting

        act = {"inspect": inspecting.main, "export": exporting.main}[command]
        return run_guarded(lambda: act(arguments[1:]))
    return run_guarded(lambda: run(arguments))


def run(argv: list[str]) -> int:
    """Parse ``argv``, train, print the last line. 0 when all steps were made, 130 after an interrupt, 1 when the last
    checkpoint could not be saved."""
    from train.example import EXAMPLE_SETTINGS

    example = cli.uses_builtin_example(cli.parse_known(argv))
    return train(cli.parse(argv, EXAMPLE_SETTINGS if example else {}))


def train(config: RunConfig) -> int:
    """Run a checked configuration to its end."""
    from observability import Progress, summary_line
    from train.checkpoint.resume import take_up_metrics
    from train.loop import StopRequest, run_loop, stop_on_interrupt
    from train.prepare import prepare, without_places
    from train.recording import Recording
    from train.replay.recorder import take_up_recordings

    # Checkpoints are directories: nothing here asks a model hub.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    progress = Progress(config.output.progress, total_steps=config.job.num_rollout)
    stop = StopRequest()
    with ExitStack() as released, progress, stop_on_interrupt(stop), collection_paused():
        progress.phase("checking configuration, prompts and device")
        prepared = prepare(config)
        config = prepared.config
        released.enter_context(prepared.directories)
        repeatable, places = without_places(config)
        cli.write_config(repeatable, prepared.run_dir / "config.toml", prepared.facts | places)
        progress.banner(prepared.facts | {"run directory": str(prepared.run_dir)})
        take_up_metrics(prepared.run_dir, prepared.resume, progress)
        take_up_recordings(config, prepared.resume, progress)
        steps_before = progress.history.steps
        runtime = make_runtime(prepared, progress)
        saver = make_saver(prepared, runtime, progress)
        stop.check_start()
        try:
            runtime.start()
            stop.start()
            # Opened only now: a start that fails leaves no trace of a run that would stand in the way of the next.
            with Recording(config, prepared.run_dir, prepared.facts, progress, stop) as recording:
                history = run_loop(
                    runtime,
                    num_rollout=prepared.num_rollout,
                    tracker=recording.tracker,
                    progress=progress,
                    stop=stop,
                    evaluations=evaluation_plan(config),
                    transcripts=recording.transcripts,
                    first=prepared.first_rollout,
                    saver=saver,
                )
                if saver is not None:
                    saver.finish()
                if config.output.save_hf is not None and not (stop.requested and history.steps == steps_before):
                    progress.phase(f"writing the model to {config.output.save_hf}")
                    export(runtime, Path(config.output.save_hf), progress.note, replaces=prepared.replaces_export)
        finally:
            runtime.close()
    for line in prepared.profile.summary() if prepared.profile is not None else ():
        print(line)
    print(summary_line(history, prepared.run_dir, interrupted=stop.requested), flush=True)
    if saver is not None and saver.failed:
        return 1
    return 130 if stop.requested else 0


def export(runtime: Runtime, directory: Path, note: Callable[[str], None], *, replaces: bool) -> None:
    """Write the model to ``directory``, in the place of one there that ``replaces`` says is of this run too."""
    from train.megatron.weights.directory import put_aside
    from train.megatron.weights.partials import remove_leftovers

    for line in remove_leftovers(directory):
        note(line)
    with put_aside(directory) if replaces else nullcontext():
        runtime.save_hf(directory)
    for line in remove_leftovers(directory):
        note(line)


def evaluation_plan(config: RunConfig) -> EvaluationPlan:
    """When ``--eval-prompt-data`` is evaluated."""
    from train.loop import NO_EVALUATION, EvaluationPlan

    evaluation = config.evaluation
    if not evaluation.eval_prompt_data or config.debug.replays:
        return NO_EVALUATION
    before_train = not evaluation.skip_eval_before_train
    if config.debug.debug_rollout_only:  # the weights stay as they are
        return EvaluationPlan(before_train)
    return EvaluationPlan(before_train, evaluation.eval_interval, at_end=True)


def make_runtime(prepared: PreparedRun, progress: Progress) -> Runtime:
    """The runtime that ``--launcher`` names."""
    if prepared.config.job.launcher == "inline":
        from train.inline import InlineRuntime

        return InlineRuntime(
            prepared.config, prepared.accelerator, progress, prepared.run_dir, prepared.resume, prepared.profile
        )
    from train.cluster import RayRuntime

    return RayRuntime(
        prepared.config, prepared.accelerator, progress, prepared.run_dir, prepared.resume, prepared.profile
    )


def make_saver(prepared: PreparedRun, runtime: Runtime, progress: Progress) -> CheckpointSaver | None:
    """Who saves the run's checkpoints; None when none are asked for."""
    if prepared.save_directory is None:
        return None
    from train.checkpoint.saver import CheckpointSaver, RunIdentity

    return CheckpointSaver(
        prepared.save_directory,
        RunIdentity(prepared.run_id, prepared.model, prepared.config),
        runtime,
        note=progress.note,
        resumed_from=None if prepared.resume is None else prepared.resume.step,
    )
