"""A checkpoint knows no layout: what one cut into ranks saves, any other loads, with every bit of optimizer state."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file

from accel import select_accelerator
from accel.backends.cpu import CpuAccelerator
from tests.train.checkpoint_cases import NO_MODEL
from tests.train.trainer_cases import make_batch, run_config, write_model
from train.checkpoint.manifest import Checkpoint, Manifest, RolloutState, RunState, TrainerState
from train.checkpoint.trainer_state import STEMS
from train.config.run import RunConfig
from train.megatron.bootstrap import prepare_megatron

LAYOUTS = {
    "one": (1, {}),
    "tensor": (2, {"parallel": {"tensor_model_parallel_size": 2}}),
    "data": (2, {"job": {"actor_num_gpus_per_node": 2}}),
    "pipeline": (2, {"parallel": {"pipeline_model_parallel_size": 2}}),
}
CASES = {
    f"{layout} {'bf16' if bf16 else 'fp32'}": (layout, bf16)
    for layout in ("tensor", "data", "pipeline")
    for bf16 in (False, True)
}
TRAINING = {"optimizer": {"lr": 1e-3, "weight_decay": 0.1}, "algorithm": {"use_rollout_logprobs": True}}


def config_of(model: Path, layout: str, bf16: bool) -> RunConfig:
    return run_config(model, **TRAINING, **LAYOUTS[layout][1], model={"bf16": bf16})


def checkpoint_at(directory: Path) -> Checkpoint:
    trainer = TrainerState.model_validate_json((directory / "trainer.json").read_text())
    state = RunState(weight_version=0, trainer=trainer, rollout=RolloutState(source={}, generators={}))
    manifest = Manifest(step=0, run_id="", written="", learning_rate=0.0, model=NO_MODEL, config={}, state=state)
    return Checkpoint(directory, manifest)


def run_trainer(
    layout: str, bf16: bool, model: Path, source: Path | None, target: Path, batches: Sequence[int], rank: int = 0
) -> None:
    """One rank: begin from ``source`` (or the model), train on the batches, save into ``target``."""
    world_size = LAYOUTS[layout][0]
    accelerator = select_accelerator("cpu")
    prepare_megatron(accelerator)
    from train.megatron.trainer import MegatronTrainer

    trainer = MegatronTrainer(
        config_of(model, layout, bf16),
        accelerator,
        rank=rank,
        world_size=world_size,
        store_path=str(target.with_suffix(".store")) if world_size > 1 else None,
        hf_directory=model,
        resume=None if source is None else checkpoint_at(source),
    )
    try:
        for seed in batches:
            trainer.train(make_batch(model, seed=seed), rollout_id=seed)
        state = trainer.save_state(target)
    finally:
        trainer.close()
    if rank == 0:
        (target / "trainer.json.part").write_text(state.model_dump_json())
        (target / "trainer.json.part").rename(target / "trainer.json")


def save_alone(model: Path, source: Path | None, target: Path, *batches: int, bf16: bool = False) -> Path:
    target.mkdir()
    run_trainer("one", bf16, model, source, target, batches)
    return target


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {
        f"{stem} {name}": tensor
        for stem in STEMS.values()
        for name, tensor in load_file(directory / f"{stem}.safetensors").items()
    }


def assert_same_state(one: Path, other: Path) -> None:
    first, second = tensors_of(one), tensors_of(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor.view(torch.int32), second[name].view(torch.int32)), name  # -0.0 is not 0.0
    assert checkpoint_at(one).manifest.state.trainer.optimizer_steps > 0
    assert checkpoint_at(one).manifest.state.trainer == checkpoint_at(other).manifest.state.trainer


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_a_resumed_trainer_takes_the_steps_that_it_would_have_taken(
    tmp_path: Path, cpu_megatron: CpuAccelerator, bf16: bool
):
    model = write_model(tmp_path / "model", tied=True)
    whole = save_alone(model, None, tmp_path / "whole", 0, 1, 2, 3, bf16=bf16)
    half = save_alone(model, None, tmp_path / "half", 0, 1, bf16=bf16)
    assert_same_state(whole, save_alone(model, half, tmp_path / "rest", 2, 3, bf16=bf16))
    assert not torch.equal(*(tensors_of(d)["model model.norm.weight"] for d in (half, whole)))


def test_moments_are_those_of_plain_adamw(tmp_path: Path, cpu_megatron: CpuAccelerator):
    """Under the weights' own names: an independent reader of the files finds transformers' state."""
    from tests.train.trainer_cases import PlainTraining

    model = write_model(tmp_path / "model")
    saved = tensors_of(save_alone(model, None, tmp_path / "saved", 0, 1))
    plain = PlainTraining(config_of(model, "one", False))
    for seed in (0, 1):
        plain.train(make_batch(model, seed=seed), seed)
    for name, parameter in plain.model.named_parameters():
        state = plain.adam.state[parameter]
        torch.testing.assert_close(saved[f"exp_avg {name}"], state["exp_avg"], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(saved[f"exp_avg_sq {name}"], state["exp_avg_sq"], rtol=1e-4, atol=1e-9)


def test_a_checkpoint_is_a_model_directory_of_transformers_too(tmp_path: Path, cpu_megatron: CpuAccelerator):
    from transformers import AutoModelForCausalLM

    model = write_model(tmp_path / "model")
    saved = save_alone(model, None, tmp_path / "saved", 0, bf16=True)
    loaded = AutoModelForCausalLM.from_pretrained(saved)
    assert next(loaded.parameters()).dtype == torch.float32
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, tensors_of(saved)[f"model {name}"])


def go_around(rank: int, root: Path) -> None:
    """Two ranks' part of every case: train and save, load what one rank alone loaded and saved, go on from both."""
    torch.set_num_threads(1)
    for name, (layout, bf16) in CASES.items():
        model, case = root / f"model {bf16}", root / name
        trained, alone, back = (case / part for part in ("trained", "alone", "back"))
        run_trainer(layout, bf16, model, None, trained, [0, 1], rank)
        while not (alone / "trainer.json").exists():
            time.sleep(0.05)
        run_trainer(layout, bf16, model, alone, back, [], rank)
        run_trainer(layout, bf16, model, trained, case / "on from trained", [2], rank)
        run_trainer(layout, bf16, model, back, case / "on from back", [2], rank)


@pytest.fixture(scope="module")
def around(tmp_path_factory: pytest.TempPathFactory, cpu_megatron: CpuAccelerator) -> Path:
    root = tmp_path_factory.mktemp("around")
    for bf16 in (False, True):
        write_model(root / f"model {bf16}", tied=bf16)
    for name in CASES:
        for part in ("trained", "alone", "back", "on from trained", "on from back"):
            (root / name / part).mkdir(parents=True)
    ranks = mp.spawn(go_around, (root,), nprocs=2, join=False)
    for name, (_, bf16) in CASES.items():
        while not (root / name / "trained" / "trainer.json").exists():
            assert not ranks.join(timeout=0.05), "the ranks ended before they had saved"
        run_trainer("one", bf16, root / f"model {bf16}", root / name / "trained", root / name / "alone", [])
    while not ranks.join():
        pass
    return root


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_round_trip_over_another_layout_changes_no_bit(around: Path, name: str):
    case = around / name
    assert_same_state(case / "trained", case / "alone")
    assert_same_state(case / "trained", case / "back")
    # Whichever way its state came in, the layout goes on alike.
    assert_same_state(case / "on from trained", case / "on from back")
    assert not torch.equal(*(tensors_of(case / d)["exp_avg model.norm.weight"] for d in ("back", "on from back")))
