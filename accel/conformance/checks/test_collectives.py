"""Every collective that the runtime uses, on real ranks, in the types it uses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from accel.conformance import programs
from accel.conformance.ranks import RankPool

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int64": torch.int64}


@pytest.mark.parametrize("dtype", list(TYPES))
@pytest.mark.parametrize("name", [name for name in programs.COLLECTIVES if name != "objects"])
def test_collective(ranks: RankPool, needs: Callable[..., None], name: str, dtype: str) -> None:
    if dtype == "bf16":
        needs("bf16")
    if name == "uneven_all_gather":
        needs("uneven_all_gather")
    ranks.run(programs.run_collective, name, TYPES[dtype])


def test_objects(ranks: RankPool) -> None:
    ranks.run(programs.run_collective, "objects", torch.float32)
