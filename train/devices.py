"""The accelerator of a run: chosen and checked by the driver, then taken up by each worker."""

from __future__ import annotations

from accel.contract import Accelerator
from accel.errors import AcceleratorError
from samples.loading import add_user_code_dir
from train.config.run import RunConfig


def selected_accelerator(config: RunConfig) -> Accelerator:
    """Select what ``--accelerator`` names; a backend of the user's is looked for in ``--user-code-dir`` too.

    AcceleratorError when it is not usable, when it lacks what the configuration needs, and when workers could not
    import it or be given devices of it.
    """
    from accel import select_accelerator

    _find_user_code(config)
    accelerator = select_accelerator(
        None if config.job.accelerator == "auto" else config.job.accelerator,
        emulate=config.job.emulate,
        needs_device=config.job.ray_address is None,  # the driver of a cluster's job may stand on a node without one
    )
    if config.model.bf16 and not accelerator.capabilities.bf16:
        raise AcceleratorError(
            f"--bf16: the accelerator {accelerator.name!r} has no bf16 (its capabilities say so): leave --bf16 out to "
            "train in fp32, or choose another accelerator"
        )
    if config.job.deterministic and not accelerator.capabilities.deterministic:
        raise AcceleratorError(
            f"--deterministic: the accelerator {accelerator.name!r} does not say that it can (its capabilities): leave "
            "--deterministic out, or choose another accelerator"
        )
    _check_servers_give_memory_back(config, accelerator)
    if config.job.launcher == "ray":
        from accel import accelerator_spec
        from accel.placement.requests import needs_device_lease

        accelerator_spec(accelerator)
        needs_device_lease(accelerator)
    return accelerator


def _check_servers_give_memory_back(config: RunConfig, accelerator: Accelerator) -> None:
    from rollout.engines.choice import choose_engine

    if not (config.takes_turns and config.offload.offloads_rollout and choose_engine(config.rollout)[0] == "sglang"):
        return
    if not accelerator.capabilities.memory_saver:
        raise AcceleratorError(
            f"--offload-rollout (on with --colocate and --offload) with --rollout-engine sglang: servers give memory "
            f"back through torch_memory_saver, which {accelerator.name!r} does not have: use --rollout-engine torch, "
            "or --no-offload-rollout"
        )


def worker_accelerator(config: RunConfig, spec: str, *, needs_device: bool = True) -> Accelerator:
    """In a Ray worker: the driver's backend, on the device that Ray assigned to this worker, if it needs one."""
    from accel.placement.ray_worker import take_assigned_device

    _find_user_code(config)
    return take_assigned_device(spec, needs_device=needs_device)


def _find_user_code(config: RunConfig) -> None:
    if config.reward.user_code_dir is not None:
        add_user_code_dir(config.reward.user_code_dir)
