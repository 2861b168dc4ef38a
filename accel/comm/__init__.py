"""Backend strings and process groups of the selected accelerator."""

from accel.comm.backend_strings import (
    BackendSpec,
    inner_backend,
    is_accelerator_backend,
    normalize_backend,
    process_group_backend,
    weight_update_backend,
)
from accel.comm.process_groups import (
    barrier,
    destroy_process_group,
    init_process_group,
    new_host_group,
    tcp_address,
)
from accel.comm.reload import (
    register_reloadable_backend,
    release_process_groups,
    reload_process_groups,
    reloadable_groups,
)

__all__ = [
    "BackendSpec",
    "barrier",
    "destroy_process_group",
    "init_process_group",
    "inner_backend",
    "is_accelerator_backend",
    "new_host_group",
    "normalize_backend",
    "process_group_backend",
    "register_reloadable_backend",
    "release_process_groups",
    "reload_process_groups",
    "reloadable_groups",
    "tcp_address",
    "weight_update_backend",
]
