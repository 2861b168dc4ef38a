"""With --reload-process-groups, groups are there for whatever ranks do together, and given back between rollouts."""

from collections import deque
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from accel.comm import reloadable_groups
from tests.train.trainer_cases import make_batch, make_trainer, run_config, write_model
from train.batch import TrainBatch
from train.checkpoint import trainer_state
from train.checkpoint.errors import CheckpointWriteError


def all_released() -> bool:
    return all(group.released for group in reloadable_groups())


def fail_to_write_files(*_: object) -> None:
    raise OSError(28, "No space left on device")


def one_rank(rank: int, root: Path, batch: TrainBatch) -> None:
    torch.set_num_threads(1)
    parallel = {"tensor_model_parallel_size": 2, "reload_process_groups": True}
    config = run_config(root / "model", parallel=parallel)
    trainer = make_trainer(config, rank=rank, world_size=2, store=str(root / "store"))
    try:
        deque(trainer.export_weights(), maxlen=0)
        assert all_released()
        trainer.train(batch, 0)
        assert not all_released()
        deque(trainer.export_weights(), maxlen=0)
        for name in ("checkpoint", "hf"):
            (root / name).mkdir(exist_ok=True)
        trainer.save_state(root / "checkpoint")
        assert all_released()
        trainer.save_hf(root / "hf" / "model")
        assert all_released()
        if rank == 0:  # which alone writes, and alone gets to know that the disk is full
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(trainer_state, "_write_files", fail_to_write_files)
                with pytest.raises(CheckpointWriteError):
                    trainer.save_state(root / "checkpoint")
        else:
            trainer.save_state(root / "checkpoint")
        assert all_released()
        trainer.train(batch, 1)  # the run goes on
        (root / f"done {rank}").touch()
    finally:
        trainer.close()


@pytest.mark.slow
def test_groups_are_there_for_every_turn_and_given_back_after_it(tmp_path):
    write_model(tmp_path / "model")
    mp.spawn(one_rank, (tmp_path, make_batch(tmp_path / "model")), nprocs=2)
    assert (tmp_path / "done 0").exists()
    assert (tmp_path / "done 1").exists()
    assert (tmp_path / "hf" / "model" / "config.json").exists()
