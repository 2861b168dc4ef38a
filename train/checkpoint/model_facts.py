"""Which model a directory holds, told from any other without reading all of it."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from pathlib import Path

from samples.errors import InputError
from train.checkpoint.manifest import Checkpoint, ModelFacts
from train.config.run import RunConfig

# Of config.json: what says nothing about the weights.
_INCIDENTAL = {
    "_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures", "bos_token_id",
    "eos_token_id", "pad_token_id",
}  # fmt: skip
_TOKENIZER = ("tokenizer*", "vocab.*", "merges.txt", "*.model", "*.tiktoken", "added_tokens.json")
_SAMPLES, _SAMPLE_BYTES = 16, 4096


def model_facts(directory: str | Path) -> ModelFacts:
    """The facts of a Hugging Face model directory; of the weights, evenly spaced samples are looked at."""
    path = Path(directory)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    tokenizers = sorted({file for pattern in _TOKENIZER for file in path.glob(pattern) if file.is_file()})
    return ModelFacts(
        config=config,
        tokenizer=_checksum(file.read_bytes() for file in tokenizers),
        weights=_checksum(sample for file in sorted(path.glob("*.safetensors")) for sample in _samples(file)),
    )


def check_same_model(checkpoint: Checkpoint, ours: ModelFacts, config: RunConfig) -> None:
    """Raise InputError, saying what differs, unless a checkpoint belongs to the model in ``--hf-checkpoint``."""
    difference = model_difference(checkpoint.manifest.model, ours)
    if difference is not None:
        raise InputError(
            f"--load {checkpoint.directory} is the checkpoint of another model than --hf-checkpoint "
            f"{config.model.hf_checkpoint}: {difference}; give the model that the run began with"
        )


def model_difference(saved: ModelFacts, ours: ModelFacts) -> str | None:
    """What tells two models apart, ``saved`` being "there" and ``ours`` "here"; None when they are the same."""
    keys = sorted((saved.config.keys() | ours.config.keys()) - _INCIDENTAL, key=lambda key: (key != "model_type", key))
    differing = [key for key in keys if saved.config.get(key) != ours.config.get(key)]
    if differing:
        shown = ", ".join(f"{key} is {_of(saved, key)} there and {_of(ours, key)} here" for key in differing[:3])
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        return f"{shown}{more}"
    if saved.tokenizer != ours.tokenizer:
        return "the tokenizers differ, so token ids mean something else"
    if saved.weights != ours.weights:
        return "the architecture is the same, but the run began from other weights"
    return None


def _of(facts: ModelFacts, key: str) -> str:
    return json.dumps(facts.config[key]) if key in facts.config else "absent"


def _samples(file: Path) -> Iterable[bytes]:
    size = file.stat().st_size
    yield str(size).encode()
    with file.open("rb") as handle:
        for number in range(_SAMPLES):
            handle.seek(size * number // _SAMPLES)
            yield handle.read(_SAMPLE_BYTES)


def _checksum(pieces: Iterable[bytes]) -> int:
    value = 0
    for piece in pieces:
        value = zlib.crc32(piece, value)
    return value
