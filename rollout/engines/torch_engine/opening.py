"""From a Hugging Face model directory to a decoder: the fast one where it serves the model, else the general one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from rollout.engines.torch_engine.checkpoint import check_whole, read_tensors
from rollout.engines.torch_engine.decoder import Decoder
from rollout.engines.torch_engine.dense import DenseDecoder
from rollout.engines.torch_engine.dense_weights import FAMILIES, why_not_dense
from rollout.engines.torch_engine.weights import WeightUpdate
from samples.errors import InputError
from samples.model_files import check_sizes, load_config

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
    from huggingface_hub.errors import StrictDataclassError

    if not (model_dir / "config.json").is_file():
        raise InputError(f"{model_dir}: no config.json there; give a Hugging Face model directory")
    _check_config_json(model_dir / "config.json")
    try:
        return load_config(model_dir, trust_remote_code)
    except (StrictDataclassError, ValueError, TypeError, LookupError, OSError, AttributeError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"{model_dir}: transformers cannot read config.json ({reason}); for a model whose code comes with it, "
            "which is run only when asked for: --trust-remote-code"
        ) from error


def _check_config_json(path: Path) -> None:
    # Before transformers sees it: some configurations make a list by the number of layers.
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise InputError(f"{path} holds a {type(raw).__name__}, not an object")
    if raw.get("model_type") in tuple(FAMILIES):
        check_sizes(raw, str(path))


def check_model_directory(model_dir: Path, trust_remote_code: bool = False) -> None:
    """Raise InputError for what would keep a decoder from opening: configurations, files that are missing or broken.

    Only the headers of the weights are looked at; that they fit the configuration is found when they are loaded.
    """
    open_config(model_dir, trust_remote_code)
    open_generation_config(model_dir)
    check_whole(model_dir)


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
    found: set[int] = set()
    sources = [config.eos_token_id, tokenizer.eos_token_id]
    generation = open_generation_config(model_dir)
    if generation is not None:
        sources.append(generation.eos_token_id)
    for ids in sources:
        found.update([ids] if isinstance(ids, int) else ids or ())
    return frozenset(found)


def open_generation_config(model_dir: Path) -> Any:
    """``generation_config.json``, or None where there is none. Raises InputError for one that cannot be used."""
    from transformers import GenerationConfig

    path = model_dir / "generation_config.json"
    if not path.is_file():
        return None
    fix = "mend it, or remove it to go by config.json and the tokenizer"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(raw, dict):
            raise InputError(f"{path} holds a {type(raw).__name__}, not an object; {fix}")
        generation = GenerationConfig.from_pretrained(model_dir, local_files_only=True)
    except InputError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InputError(f"{path} cannot be used: {' '.join(str(error).split())}; {fix}") from error
    ids = generation.eos_token_id
    if ids is not None and not all(type(one) is int for one in (ids if isinstance(ids, list) else [ids])):
        raise InputError(f"{path}: eos_token_id={ids!r} is neither a token id nor a list of them; {fix}")
    return generation
