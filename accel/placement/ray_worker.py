"""A Ray worker's side: the driver's backend, on the device that Ray assigned."""

from __future__ import annotations

from accel.contract import Accelerator
from accel.handoff import load_accelerator_spec
from accel.visibility import resolve_visible_device_id


def take_assigned_device(spec: str, *, needs_device: bool = True) -> Accelerator:
    """Load the specification, and make the device that Ray assigned to this worker the current one.

    Ray usually narrows the visible list to it, and then it is device 0. Where the vendor's NOSET variable tells Ray to
    leave the list alone, every worker sees every device, and Ray's id is looked up in it. Of a custom resource Ray
    assigns no id: the ledger's lease is the list. Without ``needs_device`` the worker has none, and asks for facts.
    """
    import ray

    accelerator = load_accelerator_spec(spec, needs_device=needs_device)
    assigned = ray.get_runtime_context().get_accelerator_ids().get(accelerator.ray_resource, [])
    if assigned:
        accelerator.set_device(resolve_visible_device_id(assigned[0], accelerator))
    return accelerator
