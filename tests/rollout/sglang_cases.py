"""What tests on real SGLang servers share: whether there is an environment for them, a model, and an engine."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from accel import select_accelerator
from rollout.config import RolloutConfig
from rollout.deploy.config import SGLangConfig
from rollout.deploy.interpreter import sglang_python
from rollout.deploy.layout import describe_flags, plan_layout
from rollout.engines.sglang.opening import open_servers
from rollout.engines.torch_engine import TorchEngine
from samples.errors import InputError

CONTEXT = 128


def _missing():
    try:
        sglang_python(None)
    except InputError as error:
        return str(error)
    return None


MARKS = [
    pytest.mark.slow,
    pytest.mark.sglang,
    pytest.mark.skipif(_missing() is not None, reason="no SGLang here: run `make sglang-cpu` first"),
]


def servers(
    model_dir: Path, log_dir: Path, *, engines: int = 1, per_engine: int = 1, load_weights: bool = True, **settings
):
    """An engine of real servers, not started: small caches, one thread each."""
    channel = settings.pop("weight_channel", "disk")
    mode = settings.pop("pause_generation_mode", "auto")
    external = settings.get("rollout_external_engine_addrs", ())
    layout = plan_layout(
        describe_flags(
            rollout_num_gpus=0 if external else engines, num_gpus_per_engine=per_engine, external_engine_addrs=external
        )
    )
    return open_servers(
        RolloutConfig(engine_max_running_requests=32, engine_max_total_tokens=4096, pause_generation_mode=mode),
        SGLangConfig(sglang_log_dir=str(log_dir), **settings),
        layout,
        select_accelerator("cpu"),
        model_dir=model_dir,
        dtype=torch.float32,
        max_context_len=CONTEXT,
        load_weights=load_weights,
        seed=0,
        threads=1,
        trust_remote_code=False,
        weight_channel=channel,
    )


def kill_program(process) -> None:
    """kill -9 of the program itself, which its supervisor's second process has started."""
    pid = process._process.pid
    for _ in range(2):
        (pid,) = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    os.kill(pid, signal.SIGKILL)


def embedded(model_dir: Path):
    return TorchEngine(
        model_dir,
        select_accelerator("cpu"),
        dtype=torch.float32,
        max_running_requests=32,
        max_context_len=CONTEXT,
        threads=1,
    )
