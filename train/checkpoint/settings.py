"""What a run that is resumed has set otherwise than the run that saved: refused, named, or of no account."""

from __future__ import annotations

from typing import Any

from observability.redact import redacted
from samples.errors import InputError
from train.checkpoint.manifest import Checkpoint
from train.config.run import RunConfig

# Sections whose settings decide what is learned. Prompts and model are compared by content, not by their paths.
_SECTIONS = ("job", "model", "data", "rollout", "reward", "algorithm", "optimizer", "batch", "parallel")
_OF_NO_ACCOUNT = {
    "accelerator", "emulate", "launcher", "ray_address", "rollout_num_gpus", "rollout_num_gpus_per_engine",
    "num_rollout", "hf_checkpoint", "prompt_data", "user_code_dir",
}  # fmt: skip


def check_seed(checkpoint: Checkpoint, seed: int) -> None:
    """Refuse another seed than the run began with."""
    saved = checkpoint.manifest.config["job"]["seed"]
    if saved != seed:
        raise InputError(
            f"--seed {seed}: {checkpoint.directory} is of a run with --seed {saved}, from which everything random in "
            f"it follows; resume with --seed {saved}"
        )


def check_optimizer(checkpoint: Checkpoint, optimizer: str) -> None:
    """Refuse to go on with Adam where no moments were saved; what they would be begun with is nobody's wish."""
    if optimizer == "adam" and checkpoint.manifest.optimizer == "stateless-adam":
        raise InputError(
            f"--optimizer adam: {checkpoint.directory} is of a run with --optimizer stateless-adam and holds no "
            "moments; resume with --optimizer stateless-adam, or start anew from its weights with --hf-checkpoint"
        )


def check_steps_left(checkpoint: Checkpoint, num_rollout: int) -> None:
    """Refuse a checkpoint of the last of ``num_rollout`` steps, or of a later one."""
    if checkpoint.step + 1 >= num_rollout:
        raise InputError(
            f"--load {checkpoint.directory}: nothing is left to do: it was saved after step {checkpoint.step + 1}, and "
            f"the run has {num_rollout}; give a larger --num-rollout to train on (or a longer recording to replay)"
        )


def setting_notes(checkpoint: Checkpoint, config: RunConfig) -> list[str]:
    """What is set otherwise than in the run that saved, as lines; ``config`` with every default resolved.

    Prompts, their order and the model are looked at where they are opened.
    """
    saved = checkpoint.manifest.config
    changed = changed_settings(saved, redacted(config.model_dump(mode="json")))
    notes = [f"other settings than in the checkpoint: {', '.join(changed)}"] if changed else []
    return notes + _schedule_notes(saved, config)


def changed_settings(saved: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """``--lr 0.0005 (was 0.001)`` for every setting that differs and decides what is learned."""
    changed = []
    for section in _SECTIONS:
        before = saved.get(section, {})
        for name, value in ours[section].items():
            if name in before and name not in _OF_NO_ACCOUNT and before[name] != value:
                changed.append(f"--{name.replace('_', '-')} {_shown(value)} (was {_shown(before[name])})")
    return changed


def _schedule_notes(saved: dict[str, Any], config: RunConfig) -> list[str]:
    """A decay that follows --num-rollout changes with it, for the steps that are left."""
    optimizer, before = config.optimizer, saved["job"]["num_rollout"]
    follows = optimizer.lr_decay_style != "constant" and optimizer.lr_decay_iters is None
    if not follows or before == config.job.num_rollout:
        return []
    note = (
        f"--num-rollout {config.job.num_rollout} (was {before}) stretches the {optimizer.lr_decay_style} decay of the "
        f"learning rate; --lr-decay-iters {before} keeps it as it was"
    )
    return [note]


def _shown(value: object) -> str:
    match value:
        case None:
            return "none"
        case bool():
            return "on" if value else "off"
        case list():
            return " ".join(map(str, value)) or "none"
        case _:
            return str(value)
