"""The same recorded batches give the same numbers on one rank, on several real ones, each a process of its own, and
with transformers and torch's AdamW: one table, printed."""

import pickle
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp

from accel.comm import reloadable_groups
from samples.errors import InputError
from tests.train.trainer_cases import PlainTraining, make_batch, make_trainer, run_config, write_model
from train.batch import TrainBatch
from train.config.checks import validate

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
HALF = {"algorithm": FULL, "model": {"bf16": True}}
PACKED = {"algorithm": FULL, "batch": {"qkv_format": "thd", "use_dynamic_batch_size": True, "max_tokens_per_gpu": 50}}
RECOMPUTED = {"algorithm": FULL, "recompute": {"recompute_granularity": "full"}}
SELECTIVELY = {
    "algorithm": FULL,
    "recompute": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
}

SEQUENCE = {"sequence_parallel": True}

# name: the settings that one rank and several share, and what cuts the work between the ranks
TWO_RANKS = {
    "tensor": ({"algorithm": FULL}, {"parallel": TENSOR}),
    "tensor and sequence": ({"algorithm": FULL}, {"parallel": TENSOR | SEQUENCE}),
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
    "mixture, tensor": ({"algorithm": FULL}, {"parallel": TENSOR | SEQUENCE}),
    "mixture, tensor and expert": ({"algorithm": FULL}, {"parallel": TENSOR | EXPERT | SEQUENCE}),
    "mixture, pipeline": ({"algorithm": FULL}, {"parallel": PIPELINE}),
    "packed, tensor and sequence": (PACKED, {"parallel": TENSOR | SEQUENCE}),
    "packed, data": (PACKED, {"job": DATA}),
    "packed, pipeline": (PACKED, {"parallel": PIPELINE}),
    "mixture, packed, expert": (PACKED, {"parallel": EXPERT, "job": DATA}),
    "recomputed, tensor and sequence": (RECOMPUTED, {"parallel": TENSOR | SEQUENCE}),
    "recomputed, pipeline": (RECOMPUTED, {"parallel": PIPELINE}),
    "recomputed in part, tensor": (SELECTIVELY, {"parallel": TENSOR}),
    "bf16, tensor": (HALF, {"parallel": TENSOR}),
    "bf16, data": (HALF, {"job": DATA}),
    "bf16, pipeline": (HALF, {"parallel": PIPELINE}),
}
TWO_RANKS |= {
    f"{name}, groups reloaded": (TWO_RANKS[name][0], {"parallel": cut | {"reload_process_groups": True}})
    for name, cut in (("tensor", TENSOR), ("pipeline", PIPELINE))
}
OFFLOADED = {"offload": True, "check_offload_equal": True}
TWO_RANKS |= {
    f"{name}, offloaded": (TWO_RANKS[name][0], TWO_RANKS[name][1] | {"offload": OFFLOADED})
    for name in ("tensor and sequence", "data", "tied, pipeline", "mixture, tensor and expert")
}
FOUR_RANKS = {
    "corrected, tensor x data": (CORRECTED, {"parallel": TENSOR, "job": {"actor_num_gpus_per_node": 4}}),
    "tensor x data": ({"algorithm": FULL}, {"parallel": TENSOR, "job": {"actor_num_gpus_per_node": 4}}),
    "tensor x pipeline": ({"algorithm": FULL}, {"parallel": TENSOR | PIPELINE}),
    "pipeline x tensor, groups reloaded": (
        {"algorithm": FULL, "batch": {"micro_batch_size": 4}},
        {"parallel": TENSOR | PIPELINE | {"reload_process_groups": True}},
    ),
}
CASES = TWO_RANKS | FOUR_RANKS
ROLLOUTS = 5

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


def run_process(process: int, root: Path, batches: dict[str, list[TrainBatch]]) -> None:
    """One process of four through its cases, one trainer after the other: two pairs share the cases of two ranks."""
    torch.set_num_threads(1)
    pair, place = divmod(process, 2)
    # Those of all four first: processes that meet must have begun and ended their groups equally often before.
    mine = [(name, process, 4) for name in FOUR_RANKS] + [(name, place, 2) for name in list(TWO_RANKS)[pair::2]]
    for name, rank, world_size in mine:
        shared, cut = CASES[name]
        result = run_case(name, shared | cut, root, batches[name], rank, world_size)
        (root / f"{name} {rank}").write_bytes(pickle.dumps(result))


class Runs:
    """What all ranks found, and what one rank alone and transformers give for it, each computed once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._alone: dict[str, Result] = {}
        self._plain: dict[str, list[dict[str, float]]] = {}
        for kind in ("untied", "tied"):
            write_model(root / kind, tied=kind == "tied")
        write_model(root / "mixture", mixture=True)
        made = {
            (directory, kept): [make_batch(directory, seed=seed, kept=kept) for seed in range(ROLLOUTS)]
            for directory, kept in {self._kind(name) for name in CASES}
        }
        self.batches = {name: made[self._kind(name)] for name in CASES}
        mp.spawn(run_process, (root, self.batches), nprocs=4)

    def _kind(self, name: str) -> tuple[Path, bool]:
        return directory_of(name, self.root), "filtered" in name

    def several(self, name: str) -> list[Result]:
        ranks = 2 if name in TWO_RANKS else 4
        return [pickle.loads((self.root / f"{name} {rank}").read_bytes()) for rank in range(ranks)]

    def alone(self, name: str) -> Result:
        shared = CASES[name][0]
        key = f"{self._kind(name)} {shared}"
        if key not in self._alone:
            self._alone[key] = run_case(name, shared, self.root, self.batches[name], 0, 1)
        return self._alone[key]

    def plain(self, name: str) -> list[dict[str, float]] | None:
        """None for what the plain training does not do: corrections for what the rollout sampled from."""
        if name.startswith("corrected"):
            return None
        shared = {section: values for section, values in CASES[name][0].items() if section != "recompute"}
        shared["batch"] = {"num_steps_per_rollout": shared.get("batch", {}).get("num_steps_per_rollout", 1)}
        key = f"{self._kind(name)} {shared}"
        if key not in self._plain:
            training = PlainTraining(run_config(directory_of(name, self.root), **shared))
            self._plain[key] = [
                {
                    f"train/{key}": float(np.mean(values))
                    for key, values in training.train(batch, rollout_id, recompute="filtered" in name).items()
                }
                for rollout_id, batch in enumerate(self.batches[name])
            ]
        return self._plain[key]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    return Runs(tmp_path_factory.mktemp("ranks"))


def bounds(name: str) -> tuple[float, float]:
    """Of relative differences to one rank, and to transformers (always in fp32)."""
    return (5e-2, 1e-1) if "bf16" in name else (1e-5, 1e-5)


def difference(key: str, found: list[dict[str, float]], expected: list[dict[str, float]]) -> float:
    """The largest relative difference of a metric; a loss, which may be of any sign, relative to 0.1 at least."""
    pairs = zip(found, expected, strict=True)
    return max(abs(ours[key] - theirs[key]) / max(abs(theirs[key]), 0.1) for ours, theirs in pairs)


KEYS = ("train/loss", "train/grad_norm")


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_ranks_train_as_one_alone_and_as_transformers_does(name: str, runs: Runs):
    """slime 1799: what several ranks export are whole tensors, their experts under global ids."""
    metrics, weights = runs.alone(name)
    to_one, to_plain = bounds(name)
    for rank_metrics, rank_weights in runs.several(name):
        plain = runs.plain(name)
        for key in KEYS:
            assert difference(key, rank_metrics, metrics) <= to_one
            assert plain is None or difference(key, rank_metrics, plain) <= to_plain
        for one, several in zip(metrics, rank_metrics, strict=True):
            assert several == pytest.approx(one, rel=10 * to_one, abs=to_one)
        for weight, tensor in weights.items():
            torch.testing.assert_close(rank_weights[weight], tensor, rtol=to_one, atol=to_one / 5)


@pytest.mark.slow
def test_the_table_of_layouts(runs: Runs, record_property):
    header = ("layout", "ranks", "loss", "grad norm", "weights", "loss", "grad norm")
    lines = [f"{'':38}{'against one rank':>30}{'against transformers':>24}", _line(header)]
    for name in CASES:
        metrics, weights = runs.alone(name)
        several = runs.several(name)
        found = [rank_metrics for rank_metrics, _ in several]
        cells = [max(difference(key, rank, metrics) for rank in found) for key in KEYS]
        cells.append(
            max(float((mine[weight] - weights[weight]).abs().max()) for _, mine in several for weight in weights)
        )
        plain = runs.plain(name)
        if plain is not None:
            cells += [max(difference(key, rank, plain) for rank in found) for key in KEYS]
        lines.append(_line((name, len(several), *(f"{cell:.0e}" for cell in cells))))
    lines.append(f"{'context':36}  {_refusal()}")
    record_property("table", "\n".join(lines))


def _line(cells: tuple[object, ...]) -> str:
    name, ranks, *others = cells
    return f"{name!s:36}{ranks!s:>6}" + "".join(f"{cell!s:>12}" for cell in others)


def _refusal() -> str:
    with pytest.raises(InputError, match="--context-parallel-size 2") as caught:
        validate(run_config(Path("model"), parallel={"context_parallel_size": 2}))
    return "refused: " + next(line for line in str(caught.value).splitlines() if "context" in line).strip()
