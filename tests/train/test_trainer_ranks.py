"""The same recorded batches on one rank and on several real ones, each a process of its own, give the same numbers."""

import pickle
from collections import deque
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from accel.comm import reloadable_groups
from tests.train.trainer_cases import make_batch, make_trainer, run_config, write_model
from train.batch import TrainBatch

FULL = {"entropy_coef": 0.01, "kl_loss_coef": 0.1, "eps_clip_high": 0.28, "use_rollout_logprobs": True}
TENSOR, PIPELINE = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
EXPERT = {"expert_model_parallel_size": 2}
DATA = {"actor_num_gpus_per_node": 2}
FILTERED = {
    "rollout": {"rollout_top_p": 0.9},
    "batch": {"num_steps_per_rollout": 3, "use_dynamic_batch_size": True, "max_tokens_per_gpu": 30},
    "algorithm": {"loss_aggregation": "sequence-mean"},
}
CORRECTED = {
    "algorithm": {"use_tis": True, "tis_level": "sequence", "tis_clip": 1.2, "tis_clip_low": 0.8},
    "batch": {"num_steps_per_rollout": 2, "micro_batch_size": 3},
}
ONE_SAMPLE_A_STEP = {"batch": {"num_steps_per_rollout": 11}}

# name: the settings that one rank and several share, and what cuts the work between two ranks
CASES = {
    "tensor": ({"algorithm": FULL}, {"parallel": TENSOR}),
    "tensor and sequence": ({"algorithm": FULL}, {"parallel": TENSOR | {"sequence_parallel": True}}),
    "data": ({"algorithm": FULL}, {"job": DATA}),
    "pipeline": ({"algorithm": FULL, "batch": {"micro_batch_size": 4}}, {"parallel": PIPELINE}),
    "filtered, tensor": (FILTERED, {"parallel": TENSOR}),
    "filtered, data": (FILTERED, {"job": DATA}),
    "a rank without samples": (ONE_SAMPLE_A_STEP, {"job": DATA}),
    "corrected, tensor": (CORRECTED, {"parallel": TENSOR | {"sequence_parallel": True}}),
    "corrected, data": (CORRECTED, {"job": DATA}),
    "corrected, pipeline": (CORRECTED, {"parallel": PIPELINE}),
    "tied, tensor": ({"algorithm": FULL}, {"parallel": TENSOR}),
    "tied, pipeline": ({"algorithm": FULL}, {"parallel": PIPELINE}),
    "mixture, expert": ({"algorithm": FULL}, {"parallel": EXPERT, "job": DATA}),
    "mixture, tensor": ({"algorithm": FULL}, {"parallel": TENSOR | {"sequence_parallel": True}}),
    "mixture, tensor and expert": ({"algorithm": FULL}, {"parallel": TENSOR | EXPERT | {"sequence_parallel": True}}),
    "mixture, pipeline": ({"algorithm": FULL}, {"parallel": PIPELINE}),
}
CASES |= {
    f"{name}, groups reloaded": (CASES[name][0], {"parallel": cut | {"reload_process_groups": True}})
    for name, cut in (("tensor", TENSOR), ("pipeline", PIPELINE))
}
OFFLOADED = {"offload": True, "check_offload_equal": True}
CASES |= {
    f"{name}, offloaded": (CASES[name][0], CASES[name][1] | {"offload": OFFLOADED})
    for name in ("tensor and sequence", "data", "tied, pipeline", "mixture, tensor and expert")
}
FOUR_RANKS = {
    "corrected, tensor x data": (CORRECTED, {"parallel": TENSOR, "job": {"actor_num_gpus_per_node": 4}}),
    "tensor x data": ({"algorithm": FULL}, {"parallel": TENSOR, "job": {"actor_num_gpus_per_node": 4}}),
    "pipeline x tensor, groups reloaded": (
        {"algorithm": FULL, "batch": {"micro_batch_size": 4}},
        {"parallel": TENSOR | PIPELINE | {"reload_process_groups": True}},
    ),
}

Result = tuple[list[dict[str, float]], dict[str, torch.Tensor]]


def directory_of(name: str, root: Path) -> Path:
    kind = name.partition(",")[0]
    return root / (kind if kind in ("tied", "mixture") else "untied")


def run_case(name: str, sections: dict, root: Path, batches: list[TrainBatch], rank: int, world_size: int) -> Result:
    """Metrics of every rollout, and the weights at the end."""
    store = str(root / f"store {name} {world_size}") if world_size > 1 else None
    config = run_config(directory_of(name, root), **sections)
    trainer = make_trainer(config, rank=rank, world_size=world_size, store=store)
    try:
        metrics = []
        for rollout_id, batch in enumerate(batches):
            if config.offload.offload:
                trainer.release_memory()
                trainer.resume_memory()
            metrics.append(trainer.train(batch, rollout_id))
            if config.parallel.reload_process_groups:
                deque(trainer.export_weights(), maxlen=0)  # as in a run, where the groups are given back after it
                assert all(group.released for group in reloadable_groups())
        return metrics, {weight: tensor.cpu().clone() for weight, tensor in trainer.export_weights()}
    finally:
        trainer.close()


def run_rank(rank: int, world_size: int, cases: dict, root: Path, batches: dict[str, list[TrainBatch]]) -> None:
    """One trainer rank through all cases, one trainer after the other."""
    torch.set_num_threads(1)
    for name, (shared, cut) in cases.items():
        result = run_case(name, shared | cut, root, batches[name], rank, world_size)
        (root / f"{name} {rank}").write_bytes(pickle.dumps(result))


def start_ranks(world_size: int, cases: dict, root: Path) -> dict[str, list[TrainBatch]]:
    for tied in (False, True):
        write_model(root / ("tied" if tied else "untied"), tied=tied)
    write_model(root / "mixture", mixture=True)
    batches = {
        name: [make_batch(directory_of(name, root), seed=seed, kept="filtered" in name) for seed in range(5)]
        for name in cases
    }
    mp.spawn(run_rank, (world_size, cases, root, batches), nprocs=world_size)
    return batches


def assert_ranks_equal_one(name: str, shared: dict, root: Path, batches: list[TrainBatch], world_size: int) -> None:
    metrics, weights = run_case(name, shared, root, batches, 0, 1)
    for rank in range(world_size):
        rank_metrics, rank_weights = pickle.loads((root / f"{name} {rank}").read_bytes())
        for one, several in zip(metrics, rank_metrics, strict=True):
            assert several["train/grad_norm"] == pytest.approx(one["train/grad_norm"], rel=1e-5)
            assert several["train/loss"] == pytest.approx(one["train/loss"], rel=1e-5, abs=1e-6)
            assert several == pytest.approx(one, rel=1e-4, abs=1e-5)
        for weight, tensor in weights.items():
            torch.testing.assert_close(rank_weights[weight], tensor, rtol=1e-5, atol=2e-6)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> tuple[Path, dict[str, list[TrainBatch]]]:
    root = tmp_path_factory.mktemp("ranks")
    return root, start_ranks(2, CASES, root)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_as_one_alone(name: str, two_ranks):
    root, batches = two_ranks
    assert_ranks_equal_one(name, CASES[name][0], root, batches[name], 2)


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory) -> tuple[Path, dict[str, list[TrainBatch]]]:
    root = tmp_path_factory.mktemp("four ranks")
    return root, start_ranks(4, FOUR_RANKS, root)


@pytest.mark.nightly
@pytest.mark.parametrize("name", FOUR_RANKS)
def test_four_ranks_train_as_one_alone(name: str, four_ranks):
    root, batches = four_ranks
    assert_ranks_equal_one(name, FOUR_RANKS[name][0], root, batches[name], 4)
