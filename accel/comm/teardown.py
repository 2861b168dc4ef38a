"""The one order in which a process ends its communication: update groups, training groups, the world, the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist

from accel.comm.process_groups import destroy_process_group
from accel.contract import Accelerator


def end_communication(
    accelerator: Accelerator,
    *,
    update_groups: Sequence[Callable[[], None]] = (),
    training_groups: Callable[[], None] | None = None,
    failed: bool = False,
) -> None:
    """Close everything in order; nothing to close is fine. What a step raises is raised once all steps were taken.

    ``update_groups`` close groups shared with the engines, in the order given: engines wait in those, so they come
    first. ``training_groups`` lets go of groups that somebody keeps (Megatron's parallel state). After an error
    (``failed``) groups are aborted instead of shut down: a shutdown may wait for peers that will never come, and peers
    that wait for this process learn at once that it has gone.
    """
    steps: list[Callable[[], None]] = [*update_groups]
    if failed:
        steps.append(_abort_groups)
    if training_groups is not None:
        steps.append(training_groups)
    steps.append(destroy_process_group)
    if not failed:
        steps += [accelerator.synchronize, accelerator.empty_cache]
    errors: list[Exception] = []
    for step in steps:
        try:
            step()
        except Exception as error:  # noqa: BLE001 - raised below, once the rest is closed too
            errors.append(error)
    if errors:
        raise errors[0] if len(errors) == 1 else ExceptionGroup("ending the communication", errors)


def _abort_groups() -> None:
    """Subgroups in the reverse order of their creation, and the world last."""
    if not dist.is_initialized():
        return
    for group in reversed(list(dist.distributed_c10d._world.pg_map)):
        group.abort()
