"""Two real trainer ranks whose weight update is given up in the middle: the next one finds them in step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from accel import select_accelerator
from tests.train.trainer_cases import make_trainer, run_config, write_model
from train.weight_sync.plan import Summary, UpdatePlan
from train.weight_sync.sending import SendingEnd

LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"parallel": {"tensor_model_parallel_size": 2}},
    "pipeline": {"parallel": {"pipeline_model_parallel_size": 2}},
    "tensor, groups reloaded": {"parallel": {"tensor_model_parallel_size": 2, "reload_process_groups": True}},
}


def drawn(end: SendingEnd, version: int) -> Summary:
    end.begin(version, None)
    while end.next_bucket() is not None:
        pass
    return end.finish()


def run_rank(rank: int, root: Path) -> None:
    torch.set_num_threads(1)
    for name, sections in LAYOUTS.items():
        trainer = make_trainer(
            run_config(root / "model", **sections), rank=rank, world_size=2, store=str(root / f"store {name}")
        )
        end = SendingEnd(trainer.export_weights, select_accelerator("cpu"), rank)
        try:
            end.open(UpdatePlan("tensor", 4096, 60.0, str(root)))
            whole = drawn(end, 0)

            end.begin(1, None)  # the engine said no: both ranks stopped after the same bucket
            end.next_bucket()
            assert end.cancel()
            assert drawn(end, 2).digest == whole.digest

            fail_in_the_second_bucket(end)  # the first rank itself, with the other one further on
            end.begin(3, None)
            end.next_bucket()
            if rank == 0:
                with pytest.raises(OSError, match="no room"):
                    end.next_bucket()
            else:
                end.next_bucket()
            assert end.cancel()
            end.open(UpdatePlan("tensor", 4096, 60.0, str(root)))
            assert drawn(end, 4).digest == whole.digest
        finally:
            trainer.close(update_groups=[end.close])


def fail_in_the_second_bucket(end: SendingEnd) -> None:
    sender: Any = end._sender
    if end._rank:
        return
    reserve, begun = sender._reserve, 0

    def failing(used: int, nbytes: int) -> torch.Tensor:
        nonlocal begun
        begun += used == 0
        if begun == 2:
            raise OSError("no room")
        return reserve(used, nbytes)

    sender._reserve = failing


@pytest.mark.slow
def test_ranks_are_in_step_after_an_update_that_was_given_up(tmp_path: Path):
    write_model(tmp_path / "model")
    mp.spawn(run_rank, (tmp_path,), nprocs=2)
