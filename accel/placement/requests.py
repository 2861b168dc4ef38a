"""What Ray is asked for. Pure functions: Ray is not imported here."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from accel.contract import Accelerator
from accel.errors import AcceleratorError
from accel.handoff import accelerator_spec
from accel.registry import ACCELERATOR_ENV, SPEC_ENV

RAY_GPU = "GPU"  # Ray's own resource: asked for as num_gpus, and isolated by Ray
HTTP_PROXIES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy")
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def ray_request(accelerator: Accelerator, n: float) -> dict[str, Any]:
    """Options of an actor or task with ``n`` devices: ``num_gpus``, or a custom resource; fractions below 1 allowed.

    ``resources={"GPU": n}`` would take Ray's isolation away, so CUDA never gets that form.
    """
    amount = _amount(n)
    if accelerator.ray_resource == RAY_GPU:
        return {"num_gpus": amount}
    return {"resources": {accelerator.ray_resource: amount}}


def ray_bundle(accelerator: Accelerator, n: float, cpus: float = 1) -> dict[str, float]:
    """One bundle of a placement group: devices and the processors beside them."""
    bundle = {"CPU": cpus, accelerator.ray_resource: _amount(n)}
    return {resource: amount for resource, amount in bundle.items() if amount}


def ray_node_options(accelerator: Accelerator, count: int) -> dict[str, Any]:
    """What ``ray.init`` (or ``ray start``) of a node with ``count`` devices is given, so that Ray can count them."""
    return ray_request(accelerator, count)


def needs_device_lease(accelerator: Accelerator) -> bool:
    """Whether Ray's count is not enough: a custom resource has no index, and a device serves one role at a time.

    AcceleratorError for a backend whose devices are exclusive and could not be told apart by any worker.
    """
    exclusive = accelerator.capabilities.exclusive_devices and accelerator.ray_resource != RAY_GPU
    if exclusive and accelerator.visible_devices_env is None:
        raise AcceleratorError(
            f"the accelerator {accelerator.name!r} cannot be used with --launcher ray: its devices serve one role at a "
            f"time (exclusive_devices), Ray gives no index of {accelerator.ray_resource!r}, and it declares no "
            "visible_devices_env to lease them by: use --launcher inline, or declare one in the backend"
        )
    return exclusive


def ray_worker_env(
    accelerator: Accelerator,
    threads: int,
    devices: Sequence[str] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """``runtime_env={"env_vars": …}`` of a worker: set before its Python starts, hence before torch is imported.

    The driver's choice of accelerator travels as a specification; ``devices`` (leased ids) become the vendor's visible
    list, and masks that would contradict it are emptied; per-node variables of the driver stay behind; loopback calls
    do not go through HTTP proxies.
    """
    env = accelerator.worker_env(threads)
    env[SPEC_ENV] = accelerator_spec(accelerator)
    env[ACCELERATOR_ENV] = accelerator.name
    if devices is not None:
        if accelerator.visible_devices_env is None:
            raise AcceleratorError(f"{accelerator.name!r} has no visible-devices variable to give {list(devices)} to")
        env[accelerator.visible_devices_env] = ",".join(devices)
        env |= dict.fromkeys((*accelerator.same_masks, *accelerator.lower_masks), "")
        if accelerator.ray_noset_env is not None:
            env[accelerator.ray_noset_env] = "1"
    if any(environ.get(proxy) for proxy in HTTP_PROXIES):
        given = [
            host.strip() for host in environ.get("no_proxy", environ.get("NO_PROXY", "")).split(",") if host.strip()
        ]
        env["no_proxy"] = env["NO_PROXY"] = ",".join([*given, *(host for host in LOOPBACK if host not in given)])
    return {name: value for name, value in env.items() if name not in accelerator.per_node_env}


def _amount(n: float) -> float:
    whole = float(n).is_integer()
    if isinstance(n, bool) or not math.isfinite(n) or n < 0 or (n > 1 and not whole):
        raise AcceleratorError(f"{n!r} devices: ask for 0, a fraction below 1, or a whole number")
    return int(n) if whole else n
