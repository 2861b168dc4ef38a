"""Every family trains on two real ranks as on one alone: gradients summed over all who share a weight, and once."""

import pickle
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from tests.train.model_cases import KINDS, save_tiny, tiny_config
from tests.train.trainer_cases import VOCABULARY, make_batch, make_trainer, run_config
from train.batch import TrainBatch
from train.megatron.models import FAMILIES

LAYOUTS = {
    "tensor": {"parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True}},
    "pipeline": {"parallel": {"pipeline_model_parallel_size": 2}},
    "expert": {"parallel": {"expert_model_parallel_size": 2}, "job": {"actor_num_gpus_per_node": 2}},
}
SETTINGS = {"algorithm": {"entropy_coef": 0.01, "use_rollout_logprobs": True}}
Result = tuple[list[dict[str, float]], dict[str, torch.Tensor]]


def directory_of(kind: str, root: Path) -> Path:
    return root / kind.replace("/", ", ")


def has_experts(kind: str) -> bool:
    return FAMILIES[tiny_config(kind).model_type].experts(tiny_config(kind)) > 0


def kinds_of(layout: str) -> list[str]:
    return [
        kind
        for kind in KINDS
        if layout != "expert" or FAMILIES[tiny_config(kind).model_type].experts(tiny_config(kind))
    ]


def train(kind: str, root: Path, batches: list[TrainBatch], layout: dict, rank: int = 0, world_size: int = 1) -> Result:
    """Metrics of every rollout, and the weights at the end."""
    store = (
        str(root / f"store {directory_of(kind, root).name} {sorted(layout['parallel'])}") if world_size > 1 else None
    )
    config = run_config(directory_of(kind, root), **SETTINGS, **layout)
    trainer = make_trainer(config, rank=rank, world_size=world_size, store=store)
    try:
        metrics = [trainer.train(batch, rollout_id) for rollout_id, batch in enumerate(batches)]
        return metrics, {weight: tensor.clone() for weight, tensor in trainer.export_weights()}
    finally:
        trainer.close()


def run_rank(rank: int, layout: str, root: Path, batches: dict[str, list[TrainBatch]]) -> None:
    torch.set_num_threads(1)
    results = {kind: train(kind, root, batches[kind], LAYOUTS[layout], rank, 2) for kind in kinds_of(layout)}
    (root / f"{layout} {rank}").write_bytes(pickle.dumps(results))


@pytest.mark.nightly
def test_two_ranks_train_every_family_as_one_alone(tmp_path, cpu_megatron):
    for kind in KINDS:
        save_tiny(directory_of(kind, tmp_path), kind, vocab_size=VOCABULARY)
    batches = {kind: [make_batch(directory_of(kind, tmp_path), seed=seed) for seed in range(2)] for kind in KINDS}
    alone = {kind: train(kind, tmp_path, batches[kind], {"parallel": {}}) for kind in KINDS}
    problems = []
    for layout in LAYOUTS:
        mp.spawn(run_rank, (layout, tmp_path, batches), nprocs=2)
        for rank in range(2):
            for kind, (metrics, weights) in pickle.loads((tmp_path / f"{layout} {rank}").read_bytes()).items():
                problems += [f"{kind}, {layout}, rank {rank}: {p}" for p in differences(alone[kind], metrics, weights)]
    assert not problems, "\n".join(problems)


def differences(alone: Result, metrics: list[dict[str, float]], weights: dict[str, torch.Tensor]) -> list[str]:
    found = []
    for one, several in zip(alone[0], metrics, strict=True):
        for key in ("train/grad_norm", "train/loss", "train/entropy"):
            if several[key] != pytest.approx(one[key], rel=2e-5, abs=1e-6):
                found.append(f"{key} {several[key]} instead of {one[key]}")
    for name, tensor in alone[1].items():
        if not torch.allclose(weights[name], tensor, rtol=1e-5, atol=5e-6):
            found.append(f"{name} by {float((weights[name] - tensor).abs().max()):.1e}")
    return found
