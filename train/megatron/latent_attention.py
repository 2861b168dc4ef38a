"""Multi-head latent attention (DeepSeek-V2, 2.1) in Megatron's local layers, right under tensor parallelism.

Megatron's local spec splits the projections that compress keys, values and queries over tensor-parallel ranks and
gathers their results. The part of the keys that is turned is then used by each rank's own heads only, and the gather's
backward pass does not sum what they find. Here those projections are whole on every rank, as they are with
TransformerEngine, and sequence parallelism sums the gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from train.megatron.activation import SwiGLU
from train.megatron.attention import CausalAttention
from train.megatron.models.decoder import megatron_layer, uses_engine
from train.megatron.norm import RMSNorm


class LatentNorm(RMSNorm):
    """RMS norm of a compressed state; transformers leaves its epsilon at 1e-6 whatever ``rms_norm_eps`` is."""

    def __init__(self, config: Any, hidden_size: int, **_: Any) -> None:
        super().__init__(config, hidden_size, 1e-6)


class WholeLinear(torch.nn.Linear):
    """A linear layer that every tensor-parallel rank has whole; called as Megatron's are, without a bias."""

    def __init__(self, config: Any, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # Megatron reads it

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


class LatentAttention(MLASelfAttention):
    """Megatron's, with whole projections onto the compressed states."""

    def __init__(self, config: Any, *arguments: Any, **named: Any) -> None:
        super().__init__(config, *arguments, **named)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = WholeLinear(config, config.hidden_size, config.q_lora_rank)
        self.linear_kv_down_proj = WholeLinear(
            config, config.hidden_size, config.kv_lora_rank + config.qk_pos_emb_head_dim
        )


def latent_layer(config: Any, experts: int | None) -> Any:
    """The spec of a layer with latent attention, and with ``experts``, a mixture.

    TransformerEngine's linear layers could bring the norms of the compressed states, but not at their own epsilon.
    """
    layer = megatron_layer(config, experts, latent=True)
    layer.submodules.input_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    if uses_engine(config):
        attention.linear_q_up_proj = attention.linear_kv_up_proj = attention.linear_q_proj
    else:
        layer.submodules.self_attention.module = LatentAttention
    if experts or not uses_engine(config):
        layer.submodules.pre_mlp_layernorm = RMSNorm
    mlp = layer.submodules.mlp.submodules
    for part in (mlp.experts, mlp.shared_experts) if experts else (layer.submodules.mlp,):
        part.submodules.activation_func = SwiGLU
    attention.core_attention = CausalAttention
    attention.q_layernorm = attention.kv_layernorm = LatentNorm
    return layer
