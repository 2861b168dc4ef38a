"""The fused buffers of a dense Llama, Qwen2 or Qwen3, and the Hugging Face names that fill them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from rollout.engines.torch_engine.rope import FIXED_ROPE_TYPES, interleave, rope_type
from rollout.engines.torch_engine.weights import Slot, WeightTable

FAMILIES = frozenset({"llama", "qwen2", "qwen3"})


@dataclass(frozen=True)
class DenseShape:
    """Sizes and options of a dense decoder. ``group`` is the number of query heads per key-value head."""

    layers: int
    hidden: int
    intermediate: int
    kv_heads: int
    group: int
    head_dim: int
    vocab: int
    eps: float
    tied: bool
    qkv_bias: bool
    out_bias: bool
    qk_norm: bool

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


def why_not_dense(config: Any, dtype: torch.dtype) -> str | None:
    """None when the fast decoder serves this configuration exactly; else what it does not do."""
    if config.model_type not in FAMILIES:
        return f"model_type {config.model_type!r}"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"dtype {dtype}"
    if config.hidden_act != "silu":
        return f"hidden_act {config.hidden_act!r}"
    if rope_type(config) not in FIXED_ROPE_TYPES:
        return f"rope_type {rope_type(config)!r}"
    if config.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
        return "partial_rotary_factor"
    if config.model_type == "llama" and config.mlp_bias:
        return "mlp_bias"
    if config.model_type != "llama" and "sliding_attention" in (config.layer_types or ()):
        return "sliding-window layers"
    if config.to_dict().get("quantization_config") is not None:
        return "quantization_config"
    return None


def dense_shape(config: Any) -> DenseShape:
    attention_bias = config.model_type != "qwen2" and config.attention_bias
    return DenseShape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        kv_heads=config.num_key_value_heads,
        group=config.num_attention_heads // config.num_key_value_heads,
        head_dim=config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads,
        vocab=config.vocab_size,
        eps=config.rms_norm_eps,
        tied=config.tie_word_embeddings,
        qkv_bias=config.model_type == "qwen2" or attention_bias,
        out_bias=attention_bias,
        qk_norm=config.model_type == "qwen3",
    )


@dataclass
class LayerWeights:
    """One layer. ``qkv`` rows are, for each key-value head: its query heads, its key head, its value head."""

    input_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [kv_heads * (group + 2) * head_dim, hidden]
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None  # [group + 1, head_dim]: the queries' weight ``group`` times, then the keys'
    out: torch.Tensor  # [hidden, heads * head_dim]
    out_bias: torch.Tensor | None
    post_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [2 * intermediate, hidden]
    down: torch.Tensor  # [hidden, intermediate]
    # Views the other way round, as ``mm`` wants them.
    qkv_t: torch.Tensor = field(init=False)
    out_t: torch.Tensor = field(init=False)
    gate_up_t: torch.Tensor = field(init=False)
    down_t: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.qkv_t, self.out_t, self.gate_up_t, self.down_t = (
            self.qkv.t(),
            self.out.t(),
            self.gate_up.t(),
            self.down.t(),
        )


@dataclass
class DenseWeights:
    embed: torch.Tensor  # [vocab, hidden]
    layers: list[LayerWeights]
    norm: torch.Tensor  # [hidden]
    head: torch.Tensor  # [vocab, hidden]: ``embed`` itself when tied
    table: WeightTable = field(repr=False)


def allocate(shape: DenseShape, dtype: torch.dtype, device: torch.device) -> DenseWeights:
    """Buffers for all weights, not filled."""
    new = partial(torch.empty, dtype=dtype, device=device)
    slots: dict[str, Slot] = {}

    def whole(name: str, tensor: torch.Tensor) -> torch.Tensor:
        slots[name] = Slot(tensor, tensor.shape)
        return tensor

    embed = whole("model.embed_tokens.weight", new(shape.vocab, shape.hidden))
    layers = [_layer(shape, f"model.layers.{index}.", new, slots) for index in range(shape.layers)]
    norm = whole("model.norm.weight", new(shape.hidden))
    head = embed if shape.tied else whole("lm_head.weight", new(shape.vocab, shape.hidden))
    aliases = {"lm_head.weight": "model.embed_tokens.weight"} if shape.tied else {}
    return DenseWeights(embed, layers, norm, head, WeightTable(slots, aliases))


def _layer(shape: DenseShape, prefix: str, new: Any, slots: dict[str, Slot]) -> LayerWeights:
    hidden, width, group, dim = shape.hidden, shape.intermediate, shape.group, shape.head_dim

    def put(name: str, target: torch.Tensor, size: tuple[int, ...], arrange: Any = None) -> None:
        slots[prefix + name] = Slot(target, torch.Size(size), arrange)

    weights = LayerWeights(
        input_norm=new(hidden),
        qkv=new(shape.kv_heads * (group + 2) * dim, hidden),
        qkv_bias=new(shape.kv_heads * (group + 2) * dim) if shape.qkv_bias else None,
        qk_norm=new(group + 1, dim) if shape.qk_norm else None,
        out=new(hidden, shape.heads * dim),
        out_bias=new(hidden) if shape.out_bias else None,
        post_norm=new(hidden),
        gate_up=new(2 * width, hidden),
        down=new(hidden, width),
    )
    put("input_layernorm.weight", weights.input_norm, (hidden,))
    put("post_attention_layernorm.weight", weights.post_norm, (hidden,))
    put("self_attn.o_proj.weight", weights.out, (hidden, shape.heads * dim))
    put("mlp.gate_proj.weight", weights.gate_up[:width], (width, hidden))
    put("mlp.up_proj.weight", weights.gate_up[width:], (width, hidden))
    put("mlp.down_proj.weight", weights.down, (hidden, width))
    for name, part, heads in (
        ("q", slice(0, group), group),
        ("k", slice(group, group + 1), 1),
        ("v", slice(group + 1, None), 1),
    ):
        rotary = name != "v"
        rows = shape.kv_heads * heads * dim
        target = weights.qkv.view(shape.kv_heads, group + 2, dim, hidden)[:, part]
        put(f"self_attn.{name}_proj.weight", target, (rows, hidden), partial(_rows, shape, heads, rotary))
        if weights.qkv_bias is not None:
            target = weights.qkv_bias.view(shape.kv_heads, group + 2, dim, 1)[:, part]
            put(f"self_attn.{name}_proj.bias", target, (rows,), partial(_rows, shape, heads, rotary))
    if weights.out_bias is not None:
        put("self_attn.o_proj.bias", weights.out_bias, (hidden,))
    if weights.qk_norm is not None:
        put("self_attn.q_norm.weight", weights.qk_norm[:group], (dim,), partial(_norm, group))
        put("self_attn.k_norm.weight", weights.qk_norm[group:], (dim,), partial(_norm, 1))
    return weights


def _rows(shape: DenseShape, heads: int, rotary: bool, tensor: torch.Tensor) -> torch.Tensor:
    """A projection's rows as [kv_heads, heads per kv head, head_dim, columns], rotary pairs side by side."""
    rows = tensor.reshape(shape.kv_heads, heads, shape.head_dim, -1)
    return interleave(rows) if rotary else rows


def _norm(copies: int, tensor: torch.Tensor) -> torch.Tensor:
    return interleave(tensor[:, None])[:, 0].expand(copies, -1)
