"""Weights that several trainer ranks gather together, and one of them sends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file

from accel.comm import new_host_group
from tests.train.trainer_cases import make_trainer, run_config
from tests.train.weight_sync_cases import BlockingEngine, hf_greedy, plan, selected_accelerator, write_served_model
from train.weight_sync.receiving import ReceivingEnd
from train.weight_sync.sending import SendingEnd

CHANNELS = ("tensor", "disk")


def one_rank(rank: int, root: Path) -> None:
    """The first rank has the engine, and tells the other which call of its end is next, as a run's driver does."""
    torch.set_num_threads(1)
    parallel = {"pipeline_model_parallel_size": 2}
    config = run_config(root / "model", parallel=parallel)
    trainer = make_trainer(config, rank=rank, world_size=2, store=str(root / "store"))
    host = new_host_group()
    end = SendingEnd(trainer.export_weights, selected_accelerator(), rank=rank)

    def both(call: str, *arguments: object) -> object:
        if rank == 0:
            dist.broadcast_object_list([(call, arguments)], group=host)
        return getattr(end, call)(*arguments)

    try:
        if rank == 0:
            drive(both, root)
            dist.broadcast_object_list([("close", ())], group=host)
            end.close()
            return
        while True:
            told: list = [None]
            dist.broadcast_object_list(told, group=host)
            call, arguments = told[0]
            found = both(call, *arguments)
            if call == "close":
                return
            if call == "next_bucket" and found is not None:
                assert found.tensors == ()  # nothing is sent from here
    finally:
        trainer.close()


def drive(both, root: Path) -> None:
    engine = BlockingEngine(root / "model")
    receiving = ReceivingEnd(engine, selected_accelerator())
    for version, channel in enumerate(CHANNELS):
        how = plan(channel, root, bucket_bytes=3000)
        receiving.open(how, both("open", how))
        both("connect")
        both("begin", version, None)
        if how.at_once:
            both("next_bucket")
            receiving.pull(both("finish"))
        else:
            receiving.begin(version)
            while (bucket := both("next_bucket")) is not None:
                receiving.take(bucket, version)
            receiving.commit(both("finish"))
        assert engine.greedy() == (hf_greedy(root / "model"), version)
        assert engine.differing_weights(load_file(root / "model" / "model.safetensors")) == []
    receiving.close()
    engine.close()
    (root / "done").touch()


@pytest.mark.slow
def test_a_rank_with_nothing_to_send_takes_part_in_every_collective(tmp_path):
    """slime 2134. The second stage gathers its layers with the first, bucket by bucket, and sends none."""
    write_served_model(tmp_path / "model")
    mp.spawn(one_rank, (tmp_path,), nprocs=2)
    assert (tmp_path / "done").exists()
