"""From a parsed configuration to a run that can start: device chosen, prompts checked, directory made.

Everything that a person can have got wrong is found here, before any worker starts.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel.contract import Accelerator
from samples.errors import InputError
from samples.sample import Group
from samples.slices import parse_file_spec
from train.checkpoint.finding import check_files
from train.checkpoint.manifest import Checkpoint, ModelFacts
from train.checkpoint.model_facts import check_same_model, model_facts
from train.checkpoint.resume import (
    check_output_directory,
    check_save_directory,
    resume_facts,
    resumed_checkpoint,
    run_id_of,
    save_directory,
)
from train.checkpoint.settings import check_steps_left
from train.config.run import RunConfig
from train.config.sections import Section


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

    @property
    def first_rollout(self) -> int:
        """The rollout that the run begins with."""
        return 0 if self.resume is None else self.resume.step + 1


def prepare(config: RunConfig) -> PreparedRun:
    """Resolve and check ``config``; writes the run directory and, for the built-in example, its model and prompts."""
    from accel import select_accelerator

    accelerator = select_accelerator(
        None if config.job.accelerator == "auto" else config.job.accelerator,
        emulate=config.job.emulate,
        needs_device=config.job.ray_address is None,  # the driver of a cluster's job may stand on a node without one
    )
    check_devices(config, accelerator)
    resume = resumed_checkpoint(config)
    run_dir = make_run_dir(config, resume)
    if is_example(config):
        config = with_example(config, run_dir)
    config = resolve_threads(with_absolute_paths(config), accelerator)
    model = model_facts(str(config.model.hf_checkpoint))
    if resume is not None:
        check_same_model(resume, model, config)
    facts = run_facts(config, accelerator)
    num_rollout = config.job.num_rollout
    if config.debug.replays:
        num_rollout, replay_facts = preflight_replay(config)
        facts |= replay_facts
    else:
        preflight(config, resume)
    saves_to = save_directory(config, run_dir)
    if saves_to is not None:
        check_save_directory(saves_to, resume)
    if resume is not None:
        check_steps_left(resume, num_rollout)
        check_files(resume)
    facts |= resume_facts(resume, config)
    run_id = run_id_of(resume)
    facts["run_id"] = run_id
    return PreparedRun(config, accelerator, run_dir, num_rollout, facts, run_id, model, saves_to, resume)


def is_example(config: RunConfig) -> bool:
    """Whether neither a model nor prompts were given, so that the built-in example runs."""
    return config.model.hf_checkpoint is None and not config.data.prompt_data


def with_example(config: RunConfig, run_dir: Path) -> RunConfig:
    """Write the built-in example under the run directory and point the configuration at it."""
    from train.example import write_example

    files = write_example(run_dir / "example", config.job.seed)
    model = _updated(config.model, hf_checkpoint=str(files.hf_checkpoint))
    data = _updated(config.data, prompt_data=(str(files.prompt_data),))
    evaluation = config.evaluation
    if evaluation.eval_interval is not None and not evaluation.eval_prompt_data:
        evaluation = _updated(evaluation, eval_prompt_data=("held_out", str(files.eval_prompt_data)))
    return config.model_copy(update={"model": model, "data": data, "evaluation": evaluation})


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """The same files and directories, whatever directory a worker process starts in."""

    def absolute(path: str | None) -> str | None:
        return None if path is None else str(Path(path).expanduser().absolute())

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


def make_run_dir(config: RunConfig, resume: Checkpoint | None) -> Path:
    """``--output-dir``, or ``runs/<time>-<name>``; an existing run is gone on with or refused."""
    if config.output.output_dir is not None:
        run_dir = Path(config.output.output_dir)
        check_output_directory(run_dir, resume, config.checkpoint.load)
    else:
        name = config.output.run_name or (
            "example" if is_example(config) else Path(str(config.model.hf_checkpoint)).name
        )
        name = re.sub(r"[^\w.-]+", "-", name).strip("-.") or "run"
        run_dir = _unused(Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"--output-dir {run_dir} cannot be created: {error.strerror}; choose a writable place"
        ) from error
    return run_dir.resolve()


def resolve_threads(config: RunConfig, accelerator: Accelerator) -> RunConfig:
    """Thread counts as numbers: roles take turns, so on shared cores each role may use them all."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
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
    rollout = config.job.rollout_num_gpus
    if rollout is None:
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


def check_model(config: RunConfig) -> None:
    """Refuse a model that the trainer has no family for, and a layout that does not divide it."""
    from train.megatron.layout import check_layout
    from train.megatron.model import load_hf_config
    from train.megatron.models import family_of

    assert config.model.hf_checkpoint is not None
    hf_config = load_hf_config(config.model.hf_checkpoint, config.model.trust_remote_code)
    family_of(hf_config)
    check_layout(hf_config, config.parallel)


def preflight(config: RunConfig, resume: Checkpoint | None = None) -> Group:
    """Load what the workers will load and draw a first group from a data source that is then thrown away."""
    from hooks import load_sample_hooks
    from rollout.collectors.sync import UserArgs
    from rollout.engines.factory import choose_engine
    from rollout.limits import context_limits
    from rollout.rewards import build_reward
    from rollout.worker import load_filter, open_evaluation_sets
    from samples import DataSource
    from samples.tokenizer import load_tokenizer
    from train.recording import check_trackers
    from train.replay.recorder import check_recording_directory
    from train.roles import rollout_settings

    choose_engine(config.rollout)
    check_trackers(config.tracking)
    if config.debug.save_debug_rollout_data is not None:
        first = 0 if resume is None else resume.step + 1
        check_recording_directory(Path(config.debug.save_debug_rollout_data), first)
    if config.trainer_ranks:
        check_model(config)
    settings = rollout_settings(config)
    limits = context_limits(settings.model_dir, config.rollout, config.data)
    load_filter(settings)
    args = UserArgs(config.rollout, config.reward)
    load_sample_hooks(args)
    build_reward(config.reward, args)
    tokenizer = load_tokenizer(settings.model_dir, trust_remote_code=settings.trust_remote_code)
    open_evaluation_sets(settings, tokenizer)
    source = DataSource(
        config.data,
        tokenizer,
        seed=config.job.seed,
        n_samples_per_prompt=config.rollout.n_samples_per_prompt,
        max_prompt_len=limits.max_prompt_len,
    )
    if resume is not None:
        source.load_state_dict(resume.manifest.state.rollout.source)
    return source.next_groups(1)[0]


def preflight_replay(config: RunConfig) -> tuple[int, dict[str, Any]]:
    """The same where rollouts are read from a recording: how many there are, and facts about them."""
    from train.recording import check_trackers
    from train.replay.role import check_recording

    check_trackers(config.tracking)
    check_model(config)
    return check_recording(config)


def run_facts(config: RunConfig, accelerator: Accelerator) -> dict[str, Any]:
    """What this run runs on, for ``config.toml`` and the banner."""
    import platform

    import torch

    from rollout.engines.factory import choose_engine

    engine: tuple[str, str] = choose_engine(config.rollout)
    if config.debug.replays:
        engine = "none", "rollouts are replayed"
    return {
        "accelerator": accelerator.name,
        "emulated": config.job.emulate,
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


def _unused(path: Path) -> Path:
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate
