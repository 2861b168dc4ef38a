"""A trainer whose memory leaves the device between its turns trains, saves and exports as one that keeps it."""

from __future__ import annotations

import pytest
import torch

from accel.memory.host_copy import bytes_in, storages_of
from samples.errors import RunError
from tests.train.trainer_cases import make_batch, make_trainer, run_config, write_model
from train.megatron.memory import TAGS
from train.weight_sync.checksums import fast_checksum

OFFLOAD = {"offload": {"offload": True, "check_offload_equal": True}}
CASES = {
    "plain": {},
    "tied": {},
    "mixture": {},
    "bf16": {"model": {"bf16": True}},
    "without moments": {"optimizer": {"optimizer": "stateless-adam"}},
    "bf16 without moments": {"model": {"bf16": True}, "optimizer": {"optimizer": "stateless-adam"}},
    "with a reference": {"algorithm": {"kl_loss_coef": 0.1}},
}


def checksums(trainer) -> list[str]:
    held = trainer._memory._held()
    return [fast_checksum(bytes_in(storage)) for tag in TAGS for storage in storages_of(held[tag])]


def files(trainer, directory):
    directory.mkdir()
    trainer.save_state(directory)
    return {path.name: path.read_bytes() for path in directory.glob("*.safetensors")}


def train(config, directory, tmp_path, *, offload: bool):
    """Metrics, weights and checkpoint of three rollouts."""
    trainer = make_trainer(config)
    try:
        metrics = []
        for rollout_id in range(3):
            if offload and rollout_id != 1:  # by itself it takes what it needs, and gives it back again
                trainer.resume_memory()
            metrics.append(trainer.train(make_batch(directory, seed=rollout_id), rollout_id))
            if offload:
                trainer.release_memory(["optimizer"])
                assert trainer._memory.released == (TAGS if rollout_id == 1 else ("optimizer",))
                trainer.release_memory()
                trainer.release_memory()
                assert trainer._memory.released == TAGS
        saved = files(trainer, tmp_path / f"saved-{offload}")
        weights = {name: tensor.clone() for name, tensor in trainer.export_weights()}
        assert trainer._memory.released == (TAGS if offload else ())
        return metrics, weights, saved
    finally:
        trainer.close()


@pytest.mark.parametrize("case", CASES)
def test_training_saving_and_exporting_are_the_same(case, tmp_path):
    directory = write_model(tmp_path / "model", tied=case == "tied", mixture=case == "mixture")
    kept = train(run_config(directory, **CASES[case]), directory, tmp_path, offload=False)
    moved = train(run_config(directory, **CASES[case], **OFFLOAD), directory, tmp_path, offload=True)
    assert moved[0] == kept[0]
    assert moved[1].keys() == kept[1].keys()
    assert all(torch.equal(moved[1][name], tensor) for name, tensor in kept[1].items())
    assert moved[2] == kept[2]
    assert len(kept[2]) == (1 if "without" in case else 3)


def test_parameters_gradients_and_optimizer_state_come_back_bit_for_bit(tmp_path):
    """torch_memory_saver 71: checksums before and after are equal."""
    directory = write_model(tmp_path / "model")
    trainer = make_trainer(run_config(directory))
    try:
        trainer.train(make_batch(directory), 0)
        marks = {name: dict(vars(p)) for name, p in trainer._model.named_parameters()}
        addresses = [p.data_ptr() for p in trainer._model.parameters()]
        before = checksums(trainer)
        trainer._memory.release()  # gradients as the last step left them
        trainer.resume_memory()
        assert checksums(trainer) == before
        assert len(before) > 4
        assert [p.data_ptr() for p in trainer._model.parameters()] == addresses  # still views of one buffer
        for name, parameter in trainer._model.named_parameters():
            assert vars(parameter).keys() == marks[name].keys()
            assert vars(parameter)["main_grad"] is marks[name]["main_grad"]
    finally:
        trainer.close()


def test_values_that_changed_on_the_way_are_told(tmp_path):
    directory = write_model(tmp_path / "model")
    trainer = make_trainer(run_config(directory, **OFFLOAD))
    try:
        trainer.release_memory()
        trainer._memory._copies["weights"]._place._map[100] ^= 1
        with pytest.raises(
            RunError, match=r"--check-offload-equal: 1 of \d+ blocks of the trainer's memory \(weights\)"
        ):
            trainer.resume_memory()
    finally:
        trainer.close()
