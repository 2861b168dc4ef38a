"""What Gemma 4's layers have that Megatron's have not, as submodules for its layer specs."""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import build_module

from train.megatron.norm import PostNorm, RMSNorm


def normalise(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) over the last axis, computed in float32: an RMS norm without a weight."""
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)


class GemmaAttention(SelfAttention):
    """Self-attention whose head size and key heads are a layer's own, and whose values are normed.

    angles: the columns of this layer's kind in the rotary embedding that all layers share. value_is_key: what the key
    projection gives, before norm and rotation, is the value too; there is no value projection.
    """

    def __init__(
        self,
        config: Any,
        submodules: Any,
        *arguments: Any,
        head_dim: int,
        key_value_heads: int,
        value_is_key: bool,
        angles: slice,
        **named: Any,
    ) -> None:
        own = copy.copy(config)
        own.kv_channels, own.num_query_groups = head_dim, key_value_heads
        super().__init__(own, submodules, *arguments, **named)
        self.angles = angles
        self.value_is_key = value_is_key
        if value_is_key:
            self.linear_qkv = submodules.linear_qkv(
                own.hidden_size,
                self.query_projection_size + self.kv_projection_size,
                config=own,
                init_method=own.init_method,
                gather_output=False,
                bias=False,
                skip_bias_add=False,
                is_expert=False,
                tp_comm_buffer_name="qkv",
                tp_group=self.pg_collection.tp,
            )

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any, rotary_pos_emb: Any = None, **named: Any
    ) -> Any:
        """``rotary_pos_emb`` [s, 1, 1, 2 x pairs of all kinds of layers]: both halves alike."""
        pairs = rotary_pos_emb[..., : rotary_pos_emb.shape[-1] // 2][..., self.angles]
        return super().forward(hidden_states, attention_mask, rotary_pos_emb=torch.cat((pairs, pairs), dim=-1), **named)

    def get_query_key_value_tensors(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
        """Query [s, b, heads, d], key and value [s, b, groups, d]."""
        mixed, _ = self.linear_qkv(hidden_states)
        groups, d = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        queries = self.num_attention_heads_per_partition // groups
        grouped = mixed.view(*mixed.shape[:-1], groups, -1, d)
        query, key, value = grouped[..., :queries, :], grouped[..., queries, :], grouped[..., -1, :]
        return (
            self.q_layernorm(query.flatten(-3, -2)),
            self.k_layernorm(key),
            normalise(value, self.config.layernorm_epsilon),
        )


class GemmaResidual(PostNorm):
    """A layer's last step: norm, sum with the residual, and the layer's scalar, which is not trained."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("layer_scalar", torch.ones(1, dtype=config.params_dtype))
        self.layer_scalar: torch.Tensor

    def _add(
        self, output: tuple[torch.Tensor, torch.Tensor | None], residual: torch.Tensor, dropout: float
    ) -> torch.Tensor:
        return super()._add(output, residual, dropout) * self.layer_scalar


class GemmaRouter(TopKRouter):
    """Softmax over the experts of what a norm without scale, a learned scale and 1 / sqrt(hidden) make of the residual.

    The chosen experts' weights are renormalised first and multiplied by each expert's scale then: in the other order
    the scales would be lost where one expert is chosen, and bent where more are.
    """

    def __init__(self, config: Any, pg_collection: Any = None) -> None:
        super().__init__(config, pg_collection)
        self.scale = torch.nn.Parameter(torch.ones(config.hidden_size, dtype=config.params_dtype))
        self.per_expert_scale = torch.nn.Parameter(torch.ones(config.num_moe_experts, dtype=config.params_dtype))
        for parameter in (self.scale, self.per_expert_scale):
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # Megatron reads it

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Logits of all experts."""
        normed = normalise(input, self.config.layernorm_epsilon)
        logits: torch.Tensor = super().gating(normed * self.scale * self.config.hidden_size**-0.5)
        return logits

    def routing(self, logits: torch.Tensor, padding_mask: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights [tokens, experts], zero where not chosen, and which are."""
        weights, chosen = super().routing(logits, padding_mask)
        return weights * self.per_expert_scale, chosen


class GemmaExperts(MoELayer):
    """Routes by the residual itself, and gives the experts its norm."""

    def __init__(self, config: Any, submodules: Any, **named: Any) -> None:
        super().__init__(config, submodules, **named)
        self.norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def preprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Dispatch the normed tokens."""
        tokens: tuple[torch.Tensor, torch.Tensor] = super().preprocess(self.norm(hidden_states), probs, routing_map)
        return tokens


class DenseBesideExperts(torch.nn.Module):
    """A layer's feed-forward block: a dense MLP and experts, each normed before and after, and their sum.

    It takes the residual itself: the layer has no norm before it.
    """

    def __init__(self, config: Any, submodules: Any) -> None:
        super().__init__()
        dense, experts = submodules
        self.dense_norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.dense = MLP(config, dense.submodules, ffn_hidden_size=config.ffn_hidden_size)
        self.dense_post_norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.mixture = build_module(experts, config=config)
        self.experts_post_norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def set_layer_number(self, layer_number: int) -> None:
        """As Megatron tells its own."""
        self.mixture.set_layer_number(layer_number)

    def forward(self, residual: torch.Tensor, padding_mask: Any = None) -> tuple[torch.Tensor, None]:
        """[s, b, h] in and out, and no bias."""
        dense, _ = self.dense(self.dense_norm(residual))
        experts, _ = self.mixture(residual, padding_mask=padding_mask)
        return self.dense_post_norm(dense) + self.experts_post_norm(experts), None


class SoftCap(torch.autograd.Function):
    """cap * tanh(logits / cap), in the memory of the logits, which nothing else needs."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, cap: float) -> torch.Tensor:
        ctx.cap = cap
        logits.div_(cap).tanh_().mul_(cap)
        ctx.mark_dirty(logits)
        ctx.save_for_backward(logits)
        return logits

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (capped,) = ctx.saved_tensors
        slope = (capped / ctx.cap).square_().neg_().add_(1)
        return slope.mul_(gradient), None
