"""``--optimizer stateless-adam`` under Megatron's distributed optimizer, and through our checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file

from accel.backends.cpu import CpuAccelerator
from samples.errors import InputError
from tests.train.checkpoint_cases import NO_MODEL
from tests.train.trainer_cases import PlainTraining, make_batch, make_trainer, run_config, write_model
from train.checkpoint.manifest import Checkpoint, Manifest, RolloutState, RunState, TrainerState
from train.checkpoint.settings import check_optimizer
from train.config.cli import parse
from train.config.run import RunConfig

SETTINGS = {
    "optimizer": {"optimizer": "stateless-adam", "lr": 1e-3, "weight_decay": 0.1},
    "algorithm": {"use_rollout_logprobs": True},
    "batch": {"num_steps_per_rollout": 2},
}
TWO_RANKS = {"job": {"actor_num_gpus_per_node": 2}}


class FreshAdamW:
    """torch's AdamW, made anew for every step, in the place of an optimizer."""

    def __init__(self, adam: torch.optim.AdamW) -> None:
        self._adam = adam
        self.param_groups = adam.param_groups

    def zero_grad(self) -> None:
        self._adam.zero_grad()

    def step(self) -> None:
        torch.optim.AdamW([dict(group) for group in self.param_groups]).step()


def config_of(model: Path, **more: Any) -> RunConfig:
    return run_config(model, **(SETTINGS | more))


def checkpoint_at(directory: Path, state: TrainerState, optimizer: str = "stateless-adam") -> Checkpoint:
    run = RunState(weight_version=0, trainer=state, rollout=RolloutState(source={}, generators={}))
    manifest = Manifest(
        step=0, run_id="", written="", optimizer=optimizer, learning_rate=0.0, model=NO_MODEL, config={}, state=run
    )
    return Checkpoint(directory, manifest)


def train_and_save(
    model: Path, target: Path, rollouts: list[int], *, resume: Checkpoint | None = None, config: RunConfig | None = None
) -> Checkpoint:
    from accel import select_accelerator
    from train.megatron.bootstrap import prepare_megatron
    from train.megatron.trainer import MegatronTrainer

    accelerator = select_accelerator("cpu")
    prepare_megatron(accelerator)
    trainer = MegatronTrainer(
        config or config_of(model), accelerator, rank=0, world_size=1, store_path=None, hf_directory=model,
        resume=resume,
    )  # fmt: skip
    try:
        for seed in rollouts:
            trainer.train(make_batch(model, seed=seed), seed)
        for optimizer in trainer._optimizer._chained():
            saved = optimizer.optimizer.state_dict()["state"]
            assert not [value for state in saved.values() for value in state.values()]
        target.mkdir()
        return checkpoint_at(target, trainer.save_state(target))
    finally:
        trainer.close()


def test_training_equals_plain_training_with_a_new_adamw_each_step(tmp_path: Path, cpu_megatron: CpuAccelerator):
    model = write_model(tmp_path / "model")
    plain = PlainTraining(config_of(model))
    plain.adam = FreshAdamW(plain.adam)  # type: ignore[assignment]
    for seed in (0, 1):
        plain.train(make_batch(model, seed=seed), seed)
    train_and_save(model, tmp_path / "saved", [0, 1])
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    for name, parameter in plain.model.named_parameters():
        torch.testing.assert_close(saved[name], parameter.detach(), rtol=1e-4, atol=1e-6)


def test_it_is_saved_without_moments_and_resumed_to_the_bit(tmp_path: Path, cpu_megatron: CpuAccelerator):
    model = write_model(tmp_path / "model")
    whole = train_and_save(model, tmp_path / "whole", [0, 1, 2])
    half = train_and_save(model, tmp_path / "half", [0, 1])
    rest = train_and_save(model, tmp_path / "rest", [2], resume=half)
    assert sorted(path.name for path in rest.directory.glob("*.safetensors")) == ["model.safetensors"]
    assert whole.manifest.state.trainer == rest.manifest.state.trainer
    assert whole.manifest.state.trainer.optimizer_steps == 6


def test_adams_moments_are_left_behind_but_not_made_up(tmp_path: Path, cpu_megatron: CpuAccelerator):
    model = write_model(tmp_path / "model")
    adam = config_of(model, optimizer={"optimizer": "adam", "lr": 1e-3})
    with_moments = train_and_save_with_adam(model, tmp_path / "adam", adam)
    check_optimizer(with_moments, "stateless-adam")
    train_and_save(model, tmp_path / "on", [1], resume=with_moments)
    stateless = train_and_save(model, tmp_path / "stateless", [0])
    with pytest.raises(InputError, match=r"--optimizer adam: .* holds no moments"):
        check_optimizer(stateless, "adam")


def train_and_save_with_adam(model: Path, target: Path, config: RunConfig) -> Checkpoint:
    trainer = make_trainer(config)
    try:
        trainer.train(make_batch(model, seed=0), 0)
        target.mkdir()
        return checkpoint_at(target, trainer.save_state(target), "adamw")
    finally:
        trainer.close()


def run_rank(rank: int, model: Path, root: Path) -> None:
    torch.set_num_threads(1)
    trainer = make_trainer(config_of(model, **TWO_RANKS), rank=rank, world_size=2, store=str(root / "store"))
    try:
        for seed in (0, 1):
            trainer.train(make_batch(model, seed=seed), seed)
        state = trainer.save_state(root / "two")
    finally:
        trainer.close()
    if rank == 0:
        assert state.optimizer_steps == 4


@pytest.mark.slow
def test_two_ranks_of_the_distributed_optimizer_do_what_one_does(tmp_path: Path, cpu_megatron: CpuAccelerator):
    model = write_model(tmp_path / "model")
    (tmp_path / "two").mkdir()
    mp.spawn(run_rank, (model, tmp_path), nprocs=2)
    train_and_save(model, tmp_path / "one", [0, 1])
    assert not list((tmp_path / "two").glob("exp_avg*"))
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-5, atol=1e-6)


def test_slimes_flag_means_the_same() -> None:
    assert parse(["--use-stateless-adam"]).optimizer.optimizer == "stateless-adam"
    assert parse(["--optimizer", "stateless-adam"]).optimizer.optimizer == "stateless-adam"
    assert parse(["--optimizer", "adam"]).optimizer.optimizer == "adam"
    with pytest.raises(InputError, match=r"--adam-beta1 0.5: --optimizer stateless-adam keeps no moments"):
        parse(["--use-stateless-adam", "--adam-beta1", "0.5"])


def test_a_flat_file_may_name_the_optimizer_and_a_table_too(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    for text in ('optimizer = "stateless-adam"', '[optimizer]\noptimizer = "stateless-adam"\nlr = 1e-5'):
        path.write_text(text)
        assert parse(["--config", str(path)]).optimizer.optimizer == "stateless-adam"
