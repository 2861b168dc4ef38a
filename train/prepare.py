"""From a parsed configuration to a run that can start: device chosen, prompts checked, directory made.

Everything that a person can have got wrong is found here, before any worker starts.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel.contract import Accelerator
from samples.errors import InputError
from samples.slices import parse_file_spec
from train.checkpoint.finding import check_files
from train.checkpoint.generators import check_generators
from train.checkpoint.manifest import Checkpoint, ModelFacts
from train.checkpoint.model_facts import check_same_model, model_facts
from train.checkpoint.resume import (
    check_export,
    check_output_directory,
    check_save_directory,
    resume_facts,
    resumed_checkpoint,
    run_id_of,
    save_directory,
)
from train.checkpoint.settings import check_steps_left
from train.config.home import expand_home
from train.config.run import RunConfig
from train.config.sections import Section
from train.devices import selected_accelerator
from train.model_preflight import check_served_model, check_trained_model
from train.profiling import ProfilePlan, profile_plan
from train.run_directory import EXAMPLE, RunDirectory, SaveDirectory, new_name
from train.servers import resolve_server_devices, resolve_server_logs


@dataclass(frozen=True)
class PreparedRun:
    """A checked configuration with every default resolved."""

    config: RunConfig
    accelerator: Accelerator
    run_dir: Path
    num_rollout: int  # rollouts to make: --num-rollout, or fewer where a recording is shorter
    facts: dict[str, Any]
    run_id: str
    model: ModelFacts
    save_directory: Path | None  # where checkpoints go, if there are to be any
    resume: Checkpoint | None  # what the run goes on from
    profile: ProfilePlan | None  # which steps leave traces
    directories: ExitStack  # run_dir and save_directory, held for this run until it is closed
    replaces_export: bool  # --save-hf holds the model of an earlier part of this run

    @property
    def first_rollout(self) -> int:
        """The rollout that the run begins with."""
        return 0 if self.resume is None else self.resume.step + 1


def prepare(config: RunConfig) -> PreparedRun:
    """Resolve and check ``config``; makes the run directory and, for the built-in example, its model and prompts.

    The directories are the run's until ``directories`` is closed. Where the run is refused, what was made is removed.
    """
    config = expand_home(config)
    accelerator = selected_accelerator(config)
    config = resolve_server_devices(config, accelerator)
    check_devices(config, accelerator)
    resume = resumed_checkpoint(config)
    directory = claim_run_dir(config)
    saves: SaveDirectory | None = None
    try:
        config, left_aside = without_saving_where_nothing_is(config)
        saves_to = save_directory(config, directory.path)
        if saves_to is not None:
            saves = SaveDirectory(saves_to)
        prepared = _prepared(config, accelerator, directory.path, saves_to, resume)
    except BaseException:
        if saves is not None:
            saves.discard()
        directory.discard()
        raise
    prepared.facts.update(left_aside)
    prepared.directories.callback(directory.release)
    if saves is not None:
        prepared.directories.callback(saves.release)
    return prepared


def _prepared(
    config: RunConfig, accelerator: Accelerator, run_dir: Path, saves_to: Path | None, resume: Checkpoint | None
) -> PreparedRun:
    check_output_directory(run_dir, resume, config.checkpoint.load)
    if is_example(config):
        config = with_example(config, run_dir)
    config = resolve_threads(with_absolute_paths(config), accelerator)
    config = resolve_offload_dir(resolve_server_logs(config, run_dir), accelerator, run_dir)
    model = model_facts(str(config.model.hf_checkpoint))
    if resume is not None:
        check_same_model(resume, model, config)
    facts = run_facts(config, accelerator)
    num_rollout = config.job.num_rollout
    if config.debug.replays:
        num_rollout, replay_facts = preflight_replay(config, resume)
        facts |= replay_facts
    else:
        facts |= preflight(config, resume)
    if saves_to is not None:
        check_save_directory(saves_to, resume)
    replaces_export = False
    if config.output.save_hf is not None:
        replaces_export = check_export(Path(config.output.save_hf), run_dir, saves_to, resume)
    if resume is not None:
        check_steps_left(resume, num_rollout)
        check_files(resume)
    profile = profile_plan(config, run_dir, 0 if resume is None else resume.step + 1, num_rollout)
    if profile is not None:
        profile.clear()
    facts |= resume_facts(resume, config)
    run_id = run_id_of(resume)
    facts["run_id"] = run_id
    return PreparedRun(
        config=config,
        accelerator=accelerator,
        run_dir=run_dir,
        num_rollout=num_rollout,
        facts=facts,
        run_id=run_id,
        model=model,
        save_directory=saves_to,
        resume=resume,
        profile=profile,
        directories=ExitStack(),
        replaces_export=replaces_export,
    )


def without_saving_where_nothing_is(config: RunConfig) -> tuple[RunConfig, dict[str, str]]:
    """``config`` without --save-interval and --save-keep where half of the loop runs alone, and a fact that says so.

    The config.toml of a run that saved has them, and is what one gives to look at a half of that run.
    """
    debug, checkpoint = config.debug, config.checkpoint
    if checkpoint.save_interval is None or not (debug.replays or debug.debug_rollout_only):
        return config, {}
    half = "a replay draws no prompts to go on with" if debug.replays else "a rollout alone trains nothing"
    facts = {"not saved": f"--save-interval {checkpoint.save_interval} is left aside: {half}"}
    return config.model_copy(update={"checkpoint": _updated(checkpoint, save_interval=None, save_keep=None)}), facts


def is_example(config: RunConfig) -> bool:
    """Whether neither a model nor prompts were given, so that the built-in example runs."""
    return config.model.hf_checkpoint is None and not config.data.prompt_data


def with_example(config: RunConfig, run_dir: Path) -> RunConfig:
    """Write the built-in example under the run directory and point the configuration at it."""
    from train.example import write_example

    files = write_example(run_dir / EXAMPLE, config.job.seed)
    model = _updated(config.model, hf_checkpoint=str(files.hf_checkpoint))
    data = _updated(config.data, prompt_data=(str(files.prompt_data),))
    evaluation = config.evaluation
    if evaluation.eval_interval is not None and not evaluation.eval_prompt_data:
        evaluation = _updated(evaluation, eval_prompt_data=("held_out", str(files.eval_prompt_data)))
    return config.model_copy(update={"model": model, "data": data, "evaluation": evaluation})


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """The same files and directories, whatever directory a worker process starts in."""

    def absolute(path: str | None) -> str | None:
        return None if path is None else str(Path(path).absolute())

    def absolute_spec(spec: str, flag: str) -> str:
        path, rows = parse_file_spec(spec, flag)
        return f"{absolute(path)}{rows}"

    sets = [(name, absolute_spec(spec, "--eval-prompt-data")) for name, spec in config.evaluation.datasets]
    debug, model, checkpoint = config.debug, config.model, config.checkpoint
    return config.model_copy(
        update={
            "model": _updated(model, hf_checkpoint=absolute(model.hf_checkpoint), ref_load=absolute(model.ref_load)),
            "data": _updated(
                config.data, prompt_data=tuple(absolute_spec(spec, "--prompt-data") for spec in config.data.prompt_data)
            ),
            "evaluation": _updated(config.evaluation, eval_prompt_data=tuple(word for pair in sets for word in pair)),
            "reward": _updated(config.reward, user_code_dir=absolute(config.reward.user_code_dir)),
            "sglang": _updated(config.sglang, sglang_config=absolute(config.sglang.sglang_config)),
            "output": _updated(config.output, save_hf=absolute(config.output.save_hf)),
            "checkpoint": _updated(
                checkpoint,
                save=absolute(checkpoint.save),
                load=checkpoint.load if checkpoint.load == "auto" else absolute(checkpoint.load),
            ),
            "debug": _updated(
                debug,
                save_debug_rollout_data=absolute(debug.save_debug_rollout_data),
                load_debug_rollout_data=absolute(debug.load_debug_rollout_data),
            ),
        }
    )


def claim_run_dir(config: RunConfig) -> RunDirectory:
    """``--output-dir``, or a new ``runs/<time>-<name>``."""
    if config.output.output_dir is not None:
        return RunDirectory(Path(config.output.output_dir))
    name = config.output.run_name or ("example" if is_example(config) else Path(str(config.model.hf_checkpoint)).name)
    return RunDirectory.new(Path("runs"), new_name(name))


def without_places(config: RunConfig) -> tuple[RunConfig, dict[str, str]]:
    """``config`` for config.toml, without where this run writes and what it resumed; and those, to be told as facts.

    They are this run's alone: given again, another run would be refused for writing over it.
    """
    output, checkpoint, debug = config.output, config.checkpoint, config.debug
    places = {
        "output_dir": output.output_dir,
        "save_hf": output.save_hf,
        "save": checkpoint.save,
        "load": checkpoint.load,
        "save_debug_rollout_data": debug.save_debug_rollout_data,
        "sglang_log_dir": config.sglang.sglang_log_dir,
        "offload_dir": config.offload.offload_dir,
    }
    keep = checkpoint.save_keep if checkpoint.save_interval is not None else None
    repeatable = config.model_copy(
        update={
            "output": _updated(output, output_dir=None, save_hf=None),
            "checkpoint": _updated(checkpoint, save=None, load=None, save_keep=keep),
            "debug": _updated(debug, save_debug_rollout_data=None),
            "sglang": _updated(config.sglang, sglang_log_dir=None),
            "offload": _updated(config.offload, offload_dir=None),
        }
    )
    return repeatable, {name: value for name, value in places.items() if value is not None}


def resolve_offload_dir(config: RunConfig, accelerator: Accelerator, run_dir: Path) -> RunConfig:
    """``--offload-dir`` as a path, where the trainer's memory goes to a file. Raises InputError where it does not."""
    offload = config.offload
    if not (config.takes_turns and offload.offloads_trainer):
        return config
    if not accelerator.capabilities.host_memory:
        if offload.offload_dir is None:
            return config
        raise InputError(
            f"--offload-dir {offload.offload_dir}: what leaves {accelerator.name}'s memory goes to the host's, not to "
            "a file; leave it out"
        )
    directory = (run_dir if offload.offload_dir is None else Path(offload.offload_dir)).absolute()
    return config.model_copy(update={"offload": _updated(offload, offload_dir=str(directory))})


def resolve_threads(config: RunConfig, accelerator: Accelerator) -> RunConfig:
    """Thread counts as numbers. Where cores are shared each role may use them all, since the roles take turns; in the
    overlapped modes, half of them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    if config.rollout.rollout_mode != "sync":
        cores = max(1, cores // 2)
    if accelerator.capabilities.exclusive_devices:
        trainer = rollout = 1
    else:
        trainer = max(1, cores * config.job.actor_num_nodes // config.actor_world_size)
        rollout = cores
    job = _updated(
        config.job,
        trainer_threads=config.job.trainer_threads or trainer,
        rollout_threads=config.job.rollout_threads or rollout,
    )
    return config.model_copy(update={"job": job})


def check_devices(config: RunConfig, accelerator: Accelerator) -> None:
    """On one machine, refuse a job that needs more devices than are visible; on a cluster Ray's counts decide."""
    if config.job.ray_address is not None:
        return
    rollout = config.rollout_devices
    if config.offload.colocate and config.trainer_ranks:
        rollout = 0
    elif rollout is None:
        rollout = 1 if accelerator.capabilities.exclusive_devices and config.job.launcher == "ray" else 0
    if config.debug.replays:
        rollout = 0
    needed = config.trainer_ranks + rollout
    there = accelerator.device_count()
    if needed > there:
        from accel.errors import AcceleratorError

        variable = accelerator.visible_devices_env
        seen = f" ({variable}={os.environ.get(variable, 'unset')})" if variable else ""
        raise AcceleratorError(
            f"the job needs {needed} {accelerator.name} device(s): {config.trainer_ranks} to train "
            f"(--actor-num-nodes x --actor-num-gpus-per-node) and {rollout} for rollout (--rollout-num-gpus), but "
            f"{there} are there{seen}. "
            f"{accelerator.more_devices_hint()}"
        )


def preflight(config: RunConfig, resume: Checkpoint | None = None) -> dict[str, Any]:
    """Load what the workers will load and look at the first prompts of a data source that is then thrown away.

    Facts: what is skipped of the prompt files, if anything is.
    """
    from hooks import load_sample_hooks
    from rollout.collectors.sync import UserArgs
    from rollout.deploy.interpreter import check_interpreter, sglang_python
    from rollout.engines.choice import choose_engine
    from rollout.limits import context_limits
    from rollout.rewards import build_reward
    from rollout.worker import check_functions, open_evaluation_sets, open_source
    from samples.tokenizer import load_tokenizer
    from train.recording import check_trackers
    from train.replay.recorder import check_recording_directory
    from train.roles import rollout_settings

    engine = choose_engine(config.rollout)[0]
    if engine == "sglang":
        check_interpreter(sglang_python(config.sglang.sglang_python))
        from rollout.engines.sglang.opening import check_described_models

        check_described_models(rollout_settings(config).layout, config.model.trust_remote_code)
    check_trackers(config.tracking)
    if config.debug.save_debug_rollout_data is not None:
        first = 0 if resume is None else resume.step + 1
        begins_again = resume is None and config.checkpoint.load == "auto"
        check_recording_directory(Path(config.debug.save_debug_rollout_data), first, begins_again=begins_again)
    settings = rollout_settings(config)
    if config.trainer_ranks:
        check_trained_model(config)
    check_served_model(config, engine, settings.model_dir)
    context_limits(settings.model_dir, config.rollout, config.data)
    args = UserArgs(config.rollout, config.reward)
    load_sample_hooks(args)
    build_reward(config.reward, args)
    tokenizer = load_tokenizer(settings.model_dir, trust_remote_code=settings.trust_remote_code)
    check_functions(settings, tokenizer)
    evaluation_sets = open_evaluation_sets(settings, tokenizer)
    source = open_source(settings, tokenizer)
    if resume is not None:
        source.load_state_dict(resume.manifest.state.rollout.source)
        check_generators(resume.manifest.state.rollout.generators, f"--load {resume.directory}")
    skipped = source.skipped()
    for one in evaluation_sets:
        skipped += [f"--eval-prompt-data {one.name}: {text}" for text in one.source.skipped()]
    if not source.next_groups(1):
        raise InputError(f"--data-source-path {config.data.data_source_path}: get_samples gave no group to begin with")
    return {"skipped": "; ".join(skipped)} if skipped else {}


def preflight_replay(config: RunConfig, resume: Checkpoint | None = None) -> tuple[int, dict[str, Any]]:
    """The same where rollouts are read from a recording: how many there are, and facts about them."""
    from rollout.custom.training import load_conversion, load_post_process
    from train.recording import check_trackers
    from train.replay.role import check_recording

    check_trackers(config.tracking)
    load_post_process(config.reward)
    load_conversion(config.rollout, config.reward)
    check_trained_model(config)
    return check_recording(config, 0 if resume is None else resume.step + 1)


def run_facts(config: RunConfig, accelerator: Accelerator) -> dict[str, Any]:
    """What this run runs on, for ``config.toml`` and the banner."""
    import platform

    import torch

    from rollout.engines.choice import choose_engine

    engine: tuple[str, str] = choose_engine(config.rollout)
    if config.debug.replays:
        engine = "none", "rollouts are replayed"
    return {
        "accelerator": accelerator.name,
        "emulated": accelerator.emulated,
        "devices": accelerator.device_count(),
        "trainer_ranks": config.trainer_ranks,
        "engine": engine[0],
        "engine_reason": engine[1],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _updated(section: Section | Any, **values: Any) -> Any:
    """A copy with other values, checked again (``model_copy`` alone does not check)."""
    return type(section)(**(section.model_dump() | values))
