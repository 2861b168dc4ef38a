"""What families with a mixture of experts have in common: rows of the weight table, config, layer spec.

Megatron dispatches tokens and runs the experts. No auxiliary loss balances them: reinforcement learning leaves the
router to the policy gradient, as transformers does unless a caller adds the loss that it reports.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from train.megatron.models.decoder import block_spec, dense_mlp, layer_spec
from train.megatron.weights.table import COLUMN, ROW, LayerChoice, WeightEntry
from train.megatron.weights.transforms import MERGE_GATE_UP

_M = "decoder.layers.{layer}.mlp."
_H = "model.layers.{layer}.mlp."
_EXPERT = _H + "experts.{expert}."

_MOST_BEYOND = 64  # layers that predict further tokens; published models have one to three

# Published configs of DeepSeek-V3's kind say these, and transformers goes by no other value without reading them.
SIGMOID_ROUTER = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)}

# Of the router's training and of what transformers reports; no forward pass depends on them.
WITHOUT_EFFECT_OF_ROUTER = frozenset({"router_aux_loss_coef", "output_router_logits"})


def expert_rows(
    is_mixture: LayerChoice,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    block: str = _H,
) -> tuple[WeightEntry, ...]:
    """Router and experts, one Hugging Face tensor for each expert's gate, up and down projection."""
    gate, up, down = (f"{block}experts.{{expert}}.{name}.weight" for name in names)
    fc1, fc2 = (f"{_M}experts.local_experts.{{expert}}.linear_{name}.weight" for name in ("fc1", "fc2"))
    return (
        WeightEntry(_M + "router.weight", (block + "gate.weight",), where=is_mixture),
        WeightEntry(fc1, (gate, up), MERGE_GATE_UP, where=is_mixture),
        WeightEntry(fc2, (down,), where=is_mixture),
    )


def shared_expert_rows(is_mixture: LayerChoice, name: str) -> tuple[WeightEntry, ...]:
    """The experts that every token goes through, which both sides keep as one wide MLP."""
    gate, up, down = (f"{_H}{name}.{part}_proj.weight" for part in ("gate", "up", "down"))
    return (
        WeightEntry(_M + "shared_experts.linear_fc1.weight", (gate, up), MERGE_GATE_UP, COLUMN, where=is_mixture),
        WeightEntry(_M + "shared_experts.linear_fc2.weight", (down,), split=ROW, where=is_mixture),
    )


def mlp_rows(is_mixture: LayerChoice, *others: tuple[WeightEntry, ...]) -> tuple[WeightEntry, ...]:
    """Dense layers' rows, then the mixtures'."""
    dense = dense_mlp(lambda hf_config, layer: not is_mixture(hf_config, layer))
    return (*dense, *(row for rows in (expert_rows(is_mixture), *others) for row in rows))


@dataclass(frozen=True)
class ExpertFields:
    """What a config calls the number of experts, how many a token goes through, and how wide one is."""

    experts: str = "num_experts"
    per_token: str = "num_experts_per_tok"
    width: str = "moe_intermediate_size"

    @property
    def names(self) -> frozenset[str]:
        return frozenset((self.experts, self.per_token, self.width))

    def count(self, hf_config: Any) -> int:
        """Experts in a layer that has any."""
        return int(getattr(hf_config, self.experts))

    def width_of(self, hf_config: Any) -> int:
        """The width of one expert."""
        return int(getattr(hf_config, self.width))


def mixture_config(hf_config: Any, fields: ExpertFields, shared_width: int | None = None) -> dict[str, Any]:
    """Arguments of TransformerConfig for softmax routing over experts."""
    return {
        "num_moe_experts": fields.count(hf_config),
        "moe_ffn_hidden_size": fields.width_of(hf_config),
        "moe_router_topk": getattr(hf_config, fields.per_token),
        "moe_shared_expert_intermediate_size": shared_width,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall",  # micro-batches of the expert-parallel ranks differ in size
        "moe_router_pre_softmax": not getattr(hf_config, "norm_topk_prob", True),
    }


def sigmoid_router_config(scaling: float | None = None) -> dict[str, Any]:
    """Sigmoid scores in float32, chosen with a bias (a buffer) that training leaves as it is (DeepSeek-V3, 2.1.2)."""
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": False,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_dtype": "fp32",
        "moe_router_topk_scaling_factor": scaling,
    }


def router_groups(hf_config: Any) -> dict[str, Any]:
    """Experts are chosen from the best groups only (DeepSeek-V3, 2.1.2: node-limited routing)."""
    if hf_config.n_group in (None, 1):
        return {}
    return {"moe_router_num_groups": hf_config.n_group, "moe_router_group_topk": hf_config.topk_group}


def check_choice(hf_config: Any, fields: ExpertFields, *, renormalised: bool = True) -> str | None:
    """Why the experts cannot be chosen so, or None; renormalised: their weights sum to 1."""
    experts, per_token, width = fields.experts, fields.per_token, fields.width
    count, chosen, size = (getattr(hf_config, name) for name in (experts, per_token, width))
    if not isinstance(count, int) or count < 1:
        return f"{experts}={count!r}, and a mixture needs experts"
    if not isinstance(chosen, int) or not 1 <= chosen <= count:
        return f"{per_token}={chosen!r} has to be between 1 and {experts}={count}"
    if not isinstance(size, int) or size < 1:
        return f"{width}={size!r} is not the width of an expert"
    if renormalised and chosen == 1:
        return (
            f"{per_token}=1: the weight of a token's only expert would be renormalised to 1, which Megatron does not "
            "do, and its router could not learn"
        )
    return None


ROUTED_EXPERTS = ExpertFields(experts="n_routed_experts")


def dense_first(hf_config: Any, layer: int) -> bool:
    """Whether a layer has experts, where the first ``first_k_dense_replace`` have none."""
    return layer >= int(hf_config.first_k_dense_replace)


def check_dense_first(hf_config: Any) -> str | None:
    """Why ``first_k_dense_replace`` cannot be used, or None."""
    first = hf_config.first_k_dense_replace
    valid = isinstance(first, int) and first >= 0
    return None if valid else f"first_k_dense_replace={first!r} has to be a number of layers"


def check_sigmoid_mixture(hf_config: Any) -> str | None:
    """Why this router and these experts of DeepSeek-V3's kind cannot be used, or None."""
    if reason := check_choice(hf_config, ROUTED_EXPERTS):
        return reason
    if not hf_config.n_shared_experts >= 1:
        return f"n_shared_experts={hf_config.n_shared_experts!r}, and layers without shared experts are not implemented"
    if not hf_config.routed_scaling_factor > 0:
        return f"routed_scaling_factor={hf_config.routed_scaling_factor!r} has to be above 0"
    return check_router_groups(hf_config)


def check_router_groups(hf_config: Any) -> str | None:
    """Why this choice of groups cannot be used, or None."""
    groups, chosen = (1 if n is None else n for n in (hf_config.n_group, hf_config.topk_group))
    experts = hf_config.num_experts_per_tok
    routed = hf_config.n_routed_experts
    if groups < 1 or routed % groups or not 1 <= chosen <= groups or routed // groups < min(2, groups):
        return f"topk_group={chosen} of n_group={groups} groups of {routed} experts cannot be chosen"
    if chosen * (routed // groups) < experts:
        return f"topk_group={chosen} groups hold fewer than num_experts_per_tok={experts} experts"
    if groups > 1 and experts // chosen != 2:
        return (
            "transformers rates a group by its best two experts, Megatron by its best num_experts_per_tok // "
            f"topk_group ({experts} // {chosen}); groups can be used only where these are the same"
        )
    return None


def router_bias_row(is_mixture: LayerChoice, name: str = _H + "gate.e_score_correction_bias") -> WeightEntry:
    """What is added to the scores for choosing experts."""
    return WeightEntry(_M + "router.expert_bias", (name,), where=is_mixture, buffer=True)


def mixture_shapes(
    hf_config: Any,
    fields: ExpertFields,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    block: str = _H,
) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that ``expert_rows`` names."""
    hidden, experts, width = hf_config.hidden_size, fields.count(hf_config), fields.width_of(hf_config)
    gate, up, down = (f"{block}experts.{{expert}}.{name}.weight" for name in names)
    return {block + "gate.weight": (experts, hidden), gate: (width, hidden), up: (width, hidden), down: (hidden, width)}


def shared_expert_shapes(hidden: int, width: int, name: str) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that ``shared_expert_rows`` names."""
    gate, up, down = (f"{_H}{name}.{part}_proj.weight" for part in ("gate", "up", "down"))
    return {gate: (width, hidden), up: (width, hidden), down: (hidden, width)}


def layers_beyond(hf_config: Any) -> tuple[str, ...]:
    """Beginnings of the names of layers after the last, which predict further tokens and are no part of the model."""
    last = hf_config.num_hidden_layers
    names = ("num_mtp_layers", "num_nextn_predict_layers", "num_mtp_modules")  # the last are published configs' own
    counts = [getattr(hf_config, name, None) for name in names]
    extra = max([1, *(count for count in counts if isinstance(count, int))])
    return tuple(f"model.layers.{last + further}." for further in range(min(extra, _MOST_BEYOND)))


def mixture_spec(is_mixture: LayerChoice) -> Callable[[Any, Any], Any]:
    """``layer_spec`` of a family whose layers are dense or mixtures."""

    def spec(transformer_config: Any, hf_config: Any) -> Any:
        def layer(i: int) -> Any:
            experts = transformer_config.num_moe_experts if is_mixture(hf_config, i) else None
            return layer_spec(transformer_config, hf_config, experts=experts)

        return block_spec(transformer_config, layer)

    return spec
