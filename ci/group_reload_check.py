"""Process groups of one device, given back and rebuilt: ``python ci/group_reload_check.py [--accelerator NAME]``.

One rank, the world and a subgroup. Prints what a release frees; ends with 1 when a collective is wrong after a reload,
or when memory is lost with every cycle.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.distributed as dist

from accel import AcceleratorError, select_accelerator
from accel.comm import destroy_process_group, init_process_group, release_process_groups, reload_process_groups
from accel.contract import Accelerator

CYCLES = 20
LOST = 32 << 20  # bytes that all cycles together may keep


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--accelerator", default="cuda", metavar="NAME")
    options = parser.parse_args()
    try:
        check(select_accelerator(options.accelerator))
    except (AcceleratorError, AssertionError) as error:
        print(f"FAIL: {error}")
        return 1
    return 0


def check(accelerator: Accelerator) -> None:
    init_process_group(accelerator, rank=0, world_size=1, store=dist.HashStore(), reloadable=True)
    try:
        subgroup = dist.new_group([0])
        held = []
        for cycle in range(CYCLES):
            for group in (None, subgroup):
                value = torch.arange(4.0, device=accelerator.device())
                dist.all_reduce(value, group=group)
                assert value.tolist() == [0, 1, 2, 3], f"all_reduce gave {value.tolist()} in cycle {cycle}"
            accelerator.synchronize()
            with_groups = free_bytes(accelerator)
            released = release_process_groups(accelerator)
            assert len(released) == 2, f"{len(released)} groups were released, and there are 2"
            held.append(free_bytes(accelerator) - with_groups)
            assert reload_process_groups(accelerator) == released, "not all groups came back"
            if cycle == 1:  # the first cycle also sets up what stays
                early = with_groups
        lost = early - with_groups
        assert lost <= LOST, f"{lost >> 20} MiB were lost in {CYCLES} cycles"
        print(f"{CYCLES} cycles: a release frees {held[-1] >> 20} MiB, and {lost >> 20} MiB were lost in all")
    finally:
        destroy_process_group()


def free_bytes(accelerator: Accelerator) -> int:
    free = accelerator.memory_info().free
    assert free is not None, f"{accelerator.name} does not tell how much of its memory is free"
    return free


if __name__ == "__main__":
    sys.exit(main())
