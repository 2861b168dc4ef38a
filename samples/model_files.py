"""What config.json and the index of a Hugging Face model directory say, checked before anything is allocated by it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samples.errors import InputError

# The most that is taken for a size and not for a slip; each is far above any published model's.
SIZES = {
    "vocab_size": 2**27,
    "hidden_size": 2**20,
    "intermediate_size": 2**24,
    "num_hidden_layers": 2**14,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "head_dim": 2**16,
    "max_position_embeddings": 2**48,  # nothing is made by it
}

# The same of sizes that a family may have none of; how few make sense is the family's to say.
OPTIONAL_SIZES = {
    "moe_intermediate_size": 2**24,
    "shared_expert_intermediate_size": 2**24,
    "num_experts": 2**16,
    "num_local_experts": 2**16,
    "n_routed_experts": 2**16,
    "n_shared_experts": 2**16,
    "q_lora_rank": 2**20,
    "kv_lora_rank": 2**20,
    "qk_nope_head_dim": 2**16,
    "qk_rope_head_dim": 2**16,
    "v_head_dim": 2**16,
}

# Of a shape that transformers has under another name, so that no code of the model's own has to run.
SAME_SHAPE = {"kimi_k2": "deepseek_v3"}


def load_config(directory: str | Path, trust_remote_code: bool = False) -> Any:
    """transformers' own config object of a model directory, with every default filled in; nothing is downloaded.

    Raises whatever transformers raises for a config.json that it cannot use.
    """
    from transformers import CONFIG_MAPPING, AutoConfig  # seconds to import

    raw = json.loads((Path(directory) / "config.json").read_text(encoding="utf-8"))
    shape = SAME_SHAPE.get(raw.get("model_type"))
    if shape is None:
        return AutoConfig.from_pretrained(str(directory), trust_remote_code=trust_remote_code, local_files_only=True)
    raw.pop("auto_map", None)
    return CONFIG_MAPPING[shape].from_dict(raw | {"model_type": shape})


def _not_finite(value: Any, name: str = "", deeper: int = 8) -> str | None:
    """The first NaN or infinite number in a config's entries, said as ``name=value``."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"{name}={value!r}"
    entries = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    inside = (_not_finite(entry, f"{name}[{key!r}]" if name else str(key), deeper - 1) for key, entry in entries)
    return next((found for found in inside if found), None) if deeper else None


def config_for_tokenizer(directory: str | Path) -> Any:
    """What transformers' tokenizer classes are given of a model that it has under another name; None for all others.

    They would read config.json themselves, as one of a model that they do not know, and fail at its rotary embedding.
    """
    file = Path(directory) / "config.json"
    raw = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    named = isinstance(raw, dict) and raw.get("model_type") in SAME_SHAPE
    return load_config(directory) if named else None


def check_sizes(config: Mapping[str, Any], where: str) -> None:
    """Raise InputError naming ``where``, the field and its value for sizes that no decoder can have.

    ``config``: the entries of a config.json, or of a configuration with its defaults; absent and null ones are passed
    over. Values of another type are left to transformers, which knows the types.
    """

    def number(name: str) -> Any:
        value = config.get(name)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    def refuse(name: str, why: str) -> InputError:
        return InputError(f"{where}: {name}={config[name]!r} {why}; is config.json the one that came with the weights?")

    if endless := _not_finite(config):
        raise InputError(f"{where}: {endless} is not a finite number; no model is described by one")
    for name, most in SIZES.items():
        if (size := number(name)) is not None and not 1 <= size <= most:
            raise refuse(name, f"is not a size (1 to {most})")
    for name, most in OPTIONAL_SIZES.items():
        if (size := number(name)) is not None and not 0 <= size <= most:
            raise refuse(name, f"is not a size (0 to {most})")
    for name in ("rms_norm_eps", "rope_theta"):
        if (value := number(name)) is not None and not (value > 0 and math.isfinite(value)):
            raise refuse(name, "is not a number above 0")
    hidden, heads, groups = number("hidden_size"), number("num_attention_heads"), number("num_key_value_heads")
    if heads and groups and heads % groups:
        raise refuse("num_key_value_heads", f"does not divide num_attention_heads={heads}")
    head_dim, turned = number("head_dim"), number("qk_rope_head_dim")
    if turned:  # latent attention has head sizes of its own, whatever the hidden size is
        if turned % 2:
            raise refuse("qk_rope_head_dim", "is odd, but rotary embeddings turn pairs of elements")
    elif head_dim is None and hidden and heads:
        if hidden % heads:
            raise refuse("num_attention_heads", f"does not divide hidden_size={hidden}, and there is no head_dim")
        if hidden // heads % 2:
            raise refuse("num_attention_heads", f"leaves {hidden // heads} elements to a head; rotary ones are pairs")
    elif head_dim is not None and head_dim % 2:
        raise refuse("head_dim", "is odd, but rotary embeddings turn pairs of elements")


def read_weight_index(index: Path) -> dict[str, str]:
    """The file of each tensor by an ``….safetensors.index.json``: plain names of files beside it.

    Raises InputError, naming the file, for anything else, and where a file that it names is not there.
    """
    try:
        described = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{index} is not an index of safetensors files: {error}") from error
    file_of = described.get("weight_map") if isinstance(described, dict) else None
    if not isinstance(file_of, dict) or not file_of or not all(isinstance(file, str) for file in file_of.values()):
        raise InputError(
            f"{index} is not an index of safetensors files: weight_map has to be an object that names a file for each "
            "tensor"
        )
    for file in sorted(set(file_of.values())):
        if Path(file).name != file or "\\" in file or "\0" in file or file in ("", ".", ".."):
            raise InputError(f"{index}: {file!r} is not the name of a file beside it")
        try:
            there = (index.parent / file).is_file()
        except OSError:  # a name that is too long for the file system
            there = False
        if not there:
            raise InputError(f"{index.parent}: {file} is missing, {index} names it")
    return file_of
