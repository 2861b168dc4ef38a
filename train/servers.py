"""What a run's SGLang servers need that nobody said: their devices, and a place for their logs."""

from __future__ import annotations

from pathlib import Path

from accel.contract import Accelerator
from rollout.deploy.disaggregation import transfer_problem
from rollout.deploy.run_layout import run_layout
from rollout.engines.choice import choose_engine
from samples.errors import InputError
from train.config.run import RunConfig


def resolve_server_logs(config: RunConfig, run_dir: Path) -> RunConfig:
    """``--sglang-log-dir`` as a path, where there are servers that log."""
    if choose_engine(config.rollout)[0] != "sglang" or config.debug.replays:
        return config
    given = config.sglang.sglang_log_dir
    directory = run_dir / "servers" if given is None else Path(given).absolute()
    return config.model_copy(update={"sglang": config.sglang.model_copy(update={"sglang_log_dir": str(directory)})})


def resolve_server_devices(config: RunConfig, accelerator: Accelerator) -> RunConfig:
    """``--rollout-num-gpus`` as what the servers need, where each has devices of its own and nobody said it."""
    job = config.job
    if choose_engine(config.rollout)[0] != "sglang" or config.debug.replays:
        return config
    layout = run_layout(
        config.sglang, num_gpus=config.rollout_devices, num_gpus_per_engine=job.rollout_num_gpus_per_engine
    )
    exclusive = accelerator.capabilities.exclusive_devices
    problem = transfer_problem(layout, exclusive_devices=exclusive, accelerator=accelerator.name)
    if problem is not None:
        raise InputError(problem)
    if config.rollout_devices is not None or not exclusive or job.launcher != "ray":
        return config
    return config.model_copy(update={"job": job.model_copy(update={"rollout_num_gpus": layout.slots})})
