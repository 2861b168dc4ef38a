"""A checkpoint knows no layout: what one cut into ranks saves, any other loads, with every bit of optimizer state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file

from accel import select_accelerator
from tests.train.checkpoint_cases import NO_MODEL
from tests.train.trainer_cases import make_batch, make_trainer, run_config, write_model
from train.checkpoint.manifest import Checkpoint, Manifest, RolloutState, RunState, TrainerState
from train.checkpoint.trainer_state import STEMS
from train.config.run import RunConfig
from train.megatron.trainer import MegatronTrainer

LAYOUTS = {
    "one": (1, {}),
    "tensor": (2, {"parallel": {"tensor_model_parallel_size": 2}}),
    "data": (2, {"job": {"actor_num_gpus_per_node": 2}}),
    "pipeline": (2, {"parallel": {"pipeline_model_parallel_size": 2}}),
}
TRAINING = {"optimizer": {"lr": 1e-3, "weight_decay": 0.1}, "algorithm": {"use_rollout_logprobs": True}}


def config_of(model: Path, layout: str, bf16: bool) -> RunConfig:
    return run_config(model, **TRAINING, **LAYOUTS[layout][1], model={"bf16": bf16})


def checkpoint_at(directory: Path) -> Checkpoint:
    trainer = TrainerState.model_validate_json((directory / "trainer.json").read_text())
    state = RunState(weight_version=0, trainer=trainer, rollout=RolloutState(source={}, generators={}))
    manifest = Manifest(step=0, run_id="", written="", learning_rate=0.0, model=NO_MODEL, config={}, state=state)
    return Checkpoint(directory, manifest)


def run_rank(
    rank: int, layout: str, bf16: bool, model: Path, source: Path | None, target: Path, batches: list[int]
) -> None:
    """One rank: begin from ``source`` (or the model), train on the batches, save into ``target``."""
    torch.set_num_threads(1)
    world_size = LAYOUTS[layout][0]
    config = config_of(model, layout, bf16)
    accelerator = select_accelerator("cpu")
    store = str(target.with_suffix(".store")) if world_size > 1 else None
    if source is None:
        trainer = make_trainer(config, rank=rank, world_size=world_size, store=store)
    else:
        from train.megatron.bootstrap import prepare_megatron

        prepare_megatron(accelerator)
        trainer = MegatronTrainer(
            config, accelerator, rank=rank, world_size=world_size, store_path=store, hf_directory=model,
            resume=checkpoint_at(source),
        )  # fmt: skip
    try:
        for seed in batches:
            trainer.train(make_batch(model, seed=seed), rollout_id=seed)
        state = trainer.save_state(target)
        if rank == 0:
            (target / "trainer.json").write_text(state.model_dump_json())
    finally:
        trainer.close()


def save_with(layout: str, model: Path, source: Path | None, target: Path, *batches: int, bf16: bool = False) -> Path:
    target.mkdir()
    arguments = (layout, bf16, model, source, target, list(batches))
    if LAYOUTS[layout][0] == 1:
        run_rank(0, *arguments)
    else:
        mp.spawn(run_rank, arguments, nprocs=LAYOUTS[layout][0])
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
def test_a_resumed_trainer_takes_the_steps_that_it_would_have_taken(tmp_path: Path, cpu_megatron: None, bf16: bool):
    model = write_model(tmp_path / "model", tied=True)
    whole = save_with("one", model, None, tmp_path / "whole", 0, 1, 2, 3, bf16=bf16)
    half = save_with("one", model, None, tmp_path / "half", 0, 1, bf16=bf16)
    assert_same_state(whole, save_with("one", model, half, tmp_path / "rest", 2, 3, bf16=bf16))
    assert not torch.equal(*(tensors_of(d)["model model.norm.weight"] for d in (half, whole)))


def test_moments_are_those_of_plain_adamw(tmp_path: Path, cpu_megatron: None):
    """Under the weights' own names: an independent reader of the files finds transformers' state."""
    from tests.train.trainer_cases import PlainTraining

    model = write_model(tmp_path / "model")
    saved = tensors_of(save_with("one", model, None, tmp_path / "saved", 0, 1))
    plain = PlainTraining(config_of(model, "one", False))
    for seed in (0, 1):
        plain.train(make_batch(model, seed=seed), seed)
    for name, parameter in plain.model.named_parameters():
        state = plain.adam.state[parameter]
        torch.testing.assert_close(saved[f"exp_avg {name}"], state["exp_avg"], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(saved[f"exp_avg_sq {name}"], state["exp_avg_sq"], rtol=1e-4, atol=1e-9)


def test_a_checkpoint_is_a_model_directory_of_transformers_too(tmp_path: Path, cpu_megatron: None):
    from transformers import AutoModelForCausalLM

    model = write_model(tmp_path / "model")
    saved = save_with("one", model, None, tmp_path / "saved", 0, bf16=True)
    loaded = AutoModelForCausalLM.from_pretrained(saved)
    assert next(loaded.parameters()).dtype == torch.float32
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, tensors_of(saved)[f"model {name}"])


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tensor", "data", "pipeline"])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_a_round_trip_over_another_layout_changes_no_bit(tmp_path: Path, cpu_megatron: None, layout: str, bf16: bool):
    model = write_model(tmp_path / "model", tied=bf16)
    trained = save_with(layout, model, None, tmp_path / "trained", 0, 1, bf16=bf16)
    through_one = save_with("one", model, trained, tmp_path / "one", bf16=bf16)
    assert_same_state(trained, through_one)
    back = save_with(layout, model, through_one, tmp_path / "back", bf16=bf16)
    assert_same_state(trained, back)
    # Both go on alike: the layout's own arithmetic is the same whichever way its state came in.
    onwards = [
        save_with(layout, model, source, tmp_path / f"on {source.name}", 2, bf16=bf16) for source in (trained, back)
    ]
    assert_same_state(*onwards)
