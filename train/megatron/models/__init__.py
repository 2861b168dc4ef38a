"""Model families that can be trained, one file each. Importing this needs torch, not Megatron."""

from __future__ import annotations

import difflib
from typing import Any

from samples.errors import InputError
from samples.model_files import SAME_SHAPE, check_sizes
from train.megatron.models.deepseek_v3 import FAMILY as DEEPSEEK_V3
from train.megatron.models.family import ModelFamily
from train.megatron.models.gemma4_text import FAMILY as GEMMA4_TEXT
from train.megatron.models.glm4 import FAMILY as GLM4
from train.megatron.models.glm4_moe import FAMILY as GLM4_MOE
from train.megatron.models.glm4_moe_lite import FAMILY as GLM4_MOE_LITE
from train.megatron.models.gpt_oss import FAMILY as GPT_OSS
from train.megatron.models.llama import FAMILY as LLAMA
from train.megatron.models.minimax_m2 import FAMILY as MINIMAX_M2
from train.megatron.models.qwen2 import FAMILY as QWEN2
from train.megatron.models.qwen2_moe import FAMILY as QWEN2_MOE
from train.megatron.models.qwen3 import FAMILY as QWEN3
from train.megatron.models.qwen3_moe import FAMILY as QWEN3_MOE
from train.megatron.weights.fp8_blocks import block_size

_ALL = (
    DEEPSEEK_V3,
    GEMMA4_TEXT,
    GLM4,
    GLM4_MOE,
    GLM4_MOE_LITE,
    GPT_OSS,
    LLAMA,
    MINIMAX_M2,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
)
FAMILIES: dict[str, ModelFamily] = {family.model_type: family for family in _ALL}
SUPPORTED = sorted({*FAMILIES, *SAME_SHAPE})


def is_multimodal(raw_config: dict[str, Any]) -> bool:
    """Whether a config.json describes several towers, of which text is one."""
    return any(raw_config.get(part) is not None for part in ("text_config", "vision_config", "audio_config"))


def check_model_type(model_type: str | None, source: str, multimodal: bool = False) -> None:
    """Raise InputError, naming ``source`` and the supported list, for a model_type without a family."""
    if isinstance(model_type, str) and model_type in SUPPORTED and not multimodal:
        return
    kind = "is multimodal and " if multimodal else ""
    near = [] if multimodal else difflib.get_close_matches(str(model_type or ""), SUPPORTED, n=1)
    hint = f"; nearest: {near[0]}" if near else ""
    raise InputError(
        f"{source}: model_type {model_type!r} {kind}is not supported for training{hint}. "
        f"Supported: {', '.join(SUPPORTED)} (text only)"
    )


def family_of(hf_config: Any, source: str = "--hf-checkpoint") -> ModelFamily:
    """The family of a Hugging Face config, after every field of the config has been checked.

    Raises InputError for a model_type without a family, a multimodal model, one quantised in a way that is not read,
    and any field whose value the family does not implement.
    """
    check_model_type(hf_config.model_type, source, is_multimodal(hf_config.to_dict()))
    quantization = getattr(hf_config, "quantization_config", None)
    if quantization is not None:
        described = quantization if isinstance(quantization, dict) else quantization.to_dict()
        if described.get("quant_method") != "mxfp4":  # told by the names of its tensors
            block_size(described, source)
    architectures = hf_config.architectures or ()
    named = isinstance(architectures, list | tuple) and all(isinstance(name, str) for name in architectures)
    if not named or (architectures and not any(name.endswith("ForCausalLM") for name in architectures)):
        raise InputError(f"{source}: architectures={architectures!r} is not a causal language model (…ForCausalLM)")
    family = FAMILIES[hf_config.model_type]
    check_sizes(hf_config.to_dict(), source)
    family.fields.check(hf_config, source)
    return family
