"""From a Hugging Face model directory to a decoder: the fast one where it serves the model, else the general one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from rollout.engines.torch_engine.checkpoint import read_tensors
from rollout.engines.torch_engine.decoder import Decoder
from rollout.engines.torch_engine.dense import DenseDecoder
from rollout.engines.torch_engine.dense_weights import why_not_dense
from rollout.engines.torch_engine.weights import WeightUpdate
from samples.errors import InputError

DecoderChoice = Literal["auto", "dense", "general"]


@dataclass(frozen=True)
class DecoderSettings:
    model_dir: Path
    dtype: torch.dtype
    device: torch.device
    max_rows: int
    max_len: int
    max_total_tokens: int | None
    free_memory: int | None  # bytes; None: unknown
    threads: int
    load_weights: bool
    choice: DecoderChoice = "auto"
    trust_remote_code: bool = False


def open_config(model_dir: Path, trust_remote_code: bool = False) -> Any:
    """The model's configuration. Raises InputError when the directory has none that can be read."""
    from transformers import AutoConfig

    if not (model_dir / "config.json").is_file():
        raise InputError(f"{model_dir}: no config.json there; give a Hugging Face model directory")
    try:
        return AutoConfig.from_pretrained(model_dir, trust_remote_code=trust_remote_code, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"{model_dir}: transformers cannot read config.json ({reason}); for a model whose code comes with it, "
            "which is run only when asked for: --trust-remote-code"
        ) from error


def open_decoder(config: Any, settings: DecoderSettings) -> tuple[Decoder, str]:
    """The decoder, its weights loaded if asked for, and a word on which it is and why."""
    why_not = why_not_dense(config, settings.dtype) if settings.choice != "general" else "asked for"
    if why_not is None:
        return _open_dense(config, settings), "dense decoder"
    if settings.choice == "dense":
        raise InputError(f"{settings.model_dir}: the dense decoder does not serve this model: {why_not}")
    from rollout.engines.torch_engine.general import GeneralDecoder

    general = GeneralDecoder(
        settings.model_dir,
        config,
        dtype=settings.dtype,
        device=settings.device,
        max_rows=settings.max_rows,
        max_len=settings.max_len,
        max_total_tokens=settings.max_total_tokens,
        load_weights=settings.load_weights,
        trust_remote_code=settings.trust_remote_code,
    )
    return general, f"general decoder ({why_not})"


def _open_dense(config: Any, settings: DecoderSettings) -> DenseDecoder:
    decoder = DenseDecoder(
        config,
        dtype=settings.dtype,
        device=settings.device,
        max_rows=settings.max_rows,
        max_len=settings.max_len,
        max_total_tokens=settings.max_total_tokens,
        free_memory=settings.free_memory,
        threads=settings.threads,
    )
    if settings.load_weights:
        update = WeightUpdate(decoder.weights)
        try:
            for name, tensor in read_tensors(settings.model_dir):
                update.take({name: tensor})
            update.finish()
        except InputError as error:
            raise InputError(f"{settings.model_dir}: {error}") from error
    return decoder


def end_of_sequence_ids(model_dir: Path, config: Any, tokenizer: Any) -> frozenset[int]:
    """All token ids that end a response: those of generation_config.json, config.json and the tokenizer together."""
    from transformers import GenerationConfig

    found: set[int] = set()
    sources = [config.eos_token_id, tokenizer.eos_token_id]
    if (model_dir / "generation_config.json").is_file():
        sources.append(GenerationConfig.from_pretrained(model_dir).eos_token_id)
    for ids in sources:
        found.update([ids] if isinstance(ids, int) else ids or ())
    return frozenset(found)
