"""TransformerEngine's names for parameters that the weight table names as Megatron's local layers do.

Its layers hold the same tensors in the same shapes. A norm is inside of the linear layer behind it, and experts that
run as one grouped matrix product are numbered weights of one module. The table stays as it is for both.
"""

from __future__ import annotations

import re

# Ends of names: TransformerEngine's, and what the weight table calls the same parameter.
_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_q_up_proj.layer_norm_weight": "self_attention.q_layernorm.weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight": "self_attention.kv_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
_LAYER = re.compile(r"(decoder\.layers\.\d+\.)(.+)")
_GROUPED_EXPERT = re.compile(r"(.*\.experts\.)(linear_fc[12])\.(weight|bias)(\d+)")


def table_name(name: str) -> str:
    """The weight table's name of a parameter; what TransformerEngine calls no differently comes back as it is."""
    layer = _LAYER.fullmatch(name)
    if layer and layer[2] in _NORMS:
        return layer[1] + _NORMS[layer[2]]
    return _GROUPED_EXPERT.sub(r"\1local_experts.\4.\2.\3", name)
