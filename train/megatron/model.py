"""From a Hugging Face config to a Megatron GPTModel for this rank.

Nothing here imports Megatron before it is called; call ``train.megatron.bootstrap.prepare_megatron`` first.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accel.memory.deep_ep import install_deep_ep_guard
from samples.errors import InputError
from samples.model_files import check_sizes, load_config
from train.config.run import RunConfig
from train.megatron.layout import check_layout, padded_vocab_size
from train.megatron.models import check_model_type, family_of, is_multimodal
from train.megatron.recomputation import check_recompute, recompute_fields
from train.megatron.rotary import provide_fused_rotary

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig

# A padded vocabulary entry must never be sampled or weigh in a softmax; finite, so that p * log p stays zero, not NaN.
PADDED_LOGIT = -3.0e4


def read_config_json(directory: str | Path, source: str = "--hf-checkpoint") -> dict[str, Any]:
    """``config.json`` of a Hugging Face model directory, as it is, of a model_type that can be trained.

    Takes milliseconds, so a driver asks it before it starts workers. Raises InputError for a directory, a file or a
    model_type that cannot be used; ``source`` is the flag that named the directory.
    """
    path = Path(directory) / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{source} {directory}: no config.json there; name a Hugging Face model directory") from None
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{source}: {path} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise InputError(f"{source}: {path} holds a {type(raw).__name__}, not an object")
    check_model_type(raw.get("model_type"), f"{source} {directory}", is_multimodal(raw))
    check_sizes(raw, f"{source}: {path}")
    return raw


def load_hf_config(directory: str | Path, trust_remote_code: bool = False, source: str = "--hf-checkpoint") -> Any:
    """The same as transformers' own config object, with every default filled in. Raises InputError likewise."""
    read_config_json(directory, source)

    from huggingface_hub.errors import StrictDataclassError

    try:
        return load_config(directory, trust_remote_code)
    except (
        StrictDataclassError,
        ValueError,
        TypeError,
        LookupError,
        ArithmeticError,
        OSError,
        AttributeError,
        ImportError,
    ) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{source}: transformers cannot read {directory}/config.json: {reason}") from error


def transformer_config(hf_config: Any, config: RunConfig) -> TransformerConfig:
    """Megatron's config of this model: the family's architecture, and how we run it."""
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    provide_fused_rotary()
    parallel = config.parallel
    dtype = torch.bfloat16 if config.model.bf16 else torch.float32
    architecture = family_of(hf_config).transformer_config(hf_config)
    how_it_runs = {
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "context_parallel_size": parallel.context_parallel_size,
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
        "expert_tensor_parallel_size": 1,  # as join_ranks makes the groups
        "sequence_parallel": parallel.sequence_parallel,
        "transformer_impl": "local",
        **recompute_fields(config.recompute),
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": config.model.bf16,
        "perform_initialization": False,  # every weight is loaded; load_hf_weights fails on one that is not
        # Ours where TransformerEngine is absent (rotary.py, activation.py); the rest needs Apex or torch's compiler.
        "apply_rope_fusion": True,
        "use_te_activation_func": True,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
    }
    kind = MLATransformerConfig if architecture.get("multi_latent_attention") else TransformerConfig
    built: TransformerConfig = kind(**how_it_runs | architecture)
    return built


def dispatches_with_deep_ep(config: TransformerConfig) -> bool:
    """Whether a mixture of experts sends its tokens through DeepEP, which then makes buffers in the first forward."""
    by_name = config.moe_token_dispatcher_type == "flex" and config.moe_flex_dispatcher_backend == "deepep"
    return config.num_moe_experts is not None and by_name


def build_model(hf_config: Any, config: RunConfig) -> GPTModel:
    """This rank's part of the model, for the current ``parallel_state``; its weights are not set: load them.

    Logits [b, s, vocabulary / tensor-parallel size] stay split; padded entries of the vocabulary are ``PADDED_LOGIT``.
    Parameters are float32, or bfloat16 under ``--bf16``. Megatron makes its own layers on the accelerator's current
    device and torch's norms on the host: move the model before training.
    """
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.gpt import GPTModel

    check_layout(hf_config, config.parallel)
    check_recompute(hf_config, config.recompute, config.parallel.pipeline_model_parallel_size)
    family = family_of(hf_config)
    megatron_config = transformer_config(hf_config, config)
    if dispatches_with_deep_ep(megatron_config):
        install_deep_ep_guard()
    vocab_size = padded_vocab_size(hf_config, config.parallel.tensor_model_parallel_size)
    model = GPTModel(
        config=megatron_config,
        transformer_layer_spec=family.layer_spec(megatron_config, hf_config),
        vocab_size=vocab_size,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        **family.gpt_model(hf_config),
    )
    _mark_split_weights(model)
    for module in model.modules():
        if isinstance(module, RotaryEmbedding):
            module.inv_freq = family.inverse_frequencies(hf_config).to(module.inv_freq.device)
    if family.adapt is not None:
        family.adapt(model, hf_config)
    if config.model.bf16:
        _to_bfloat16(model)
    if model.post_process and vocab_size > hf_config.vocab_size:
        _mask_padded_logits(model, hf_config.vocab_size)
    return model


def _to_bfloat16(model: GPTModel) -> None:
    """Parameters alone: norms are made in float32, and buffers (a router's bias) stay in it, as transformers has it."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()


def _mark_split_weights(model: GPTModel) -> None:
    # Megatron says which weights are slices only where it also initialises them. An unmarked slice counts as a copy of
    # the first tensor-parallel rank's, and the gradient norm leaves out the other ranks' slices.
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
    from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

    for module in model.modules():
        split = isinstance(module, ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding)
        if split and module.weight is not None:  # a tied head has no weight of its own
            dim = 1 if isinstance(module, RowParallelLinear) else 0
            set_tensor_model_parallel_attributes(module.weight, is_parallel=True, dim=dim, stride=1)
        if getattr(module, "is_expert", False):
            _mark_expert(module)


def _mark_expert(module: torch.nn.Module) -> None:
    # Experts are whole on a rank, so that tensor-parallel ranks hold copies and see other tokens: replicas, over which
    # gradients are summed and the optimizer's state is shared. Megatron takes them for it only where there are several
    # expert-parallel ranks, and their biases for something else: for parts that sequence parallelism leaves to be
    # summed, and for copies of which the gradient norm counts the first rank's only.
    from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

    for parameter in module.parameters():
        parameter.allreduce = False  # type: ignore[attr-defined]
        parameter.sequence_parallel = False  # type: ignore[attr-defined]
        if not hasattr(parameter, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)


def _mask_padded_logits(model: GPTModel, vocab_size: int) -> None:
    from megatron.core import parallel_state

    def mask(_module: torch.nn.Module, _inputs: Any, outputs: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        logits, bias = outputs
        first = parallel_state.get_tensor_model_parallel_rank() * logits.shape[-1]
        padded = torch.arange(first, first + logits.shape[-1], device=logits.device) >= vocab_size
        return logits.masked_fill(padded, PADDED_LOGIT), bias

    model.output_layer.register_forward_hook(mask)
