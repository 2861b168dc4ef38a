"""Megatron's TransformerEngine layers, by name and shape: the weight table loads and exports them as it does others.

TransformerEngine is not there. Its modules' parameters are stood in for; which module a layer has where is Megatron's
own ``get_gpt_layer_with_transformer_engine_spec``, with what every family changes in it (twelve of twelve).
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.train.model_cases import KINDS, Loaded, load, on_disk, save_tiny
from train.config.run import RunConfig
from train.megatron.layout import padded_vocab_size
from train.megatron.model import load_hf_config, transformer_config
from train.megatron.models import family_of
from train.megatron.models.decoder import block_spec, megatron_layer
from train.megatron.weights.engine_names import table_name
from train.megatron.weights.exporting import iter_hf_weights
from train.megatron.weights.loading import load_hf_weights

pytestmark = pytest.mark.usefixtures("one_rank")

# Families whose layers Megatron's own spec describes; all have one besides that keeps what is particular to them.
OF_MEGATRON = ["llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "glm4_moe", "glm4_moe_lite", "deepseek_v3"]


class Linear(nn.Module):
    """Parameters of te.pytorch.Linear."""

    def __init__(self, input_size, output_size, *, bias=False, **_):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(output_size, input_size))
        if bias:
            self.bias = nn.Parameter(torch.empty(output_size))


class LayerNormLinear(Linear):
    """Parameters of te.pytorch.LayerNormLinear with normalization="RMSNorm"."""

    def __init__(self, input_size, output_size, **options):
        super().__init__(input_size, output_size, **options)
        self.layer_norm_weight = nn.Parameter(torch.empty(input_size))


class GroupedLinear(nn.Module):
    """Parameters of te.pytorch.GroupedLinear."""

    def __init__(self, num_gemms, input_size, output_size, *, bias=False, **_):
        super().__init__()
        for i in range(num_gemms):
            self.register_parameter(f"weight{i}", nn.Parameter(torch.empty(output_size, input_size)))
            if bias:
                self.register_parameter(f"bias{i}", nn.Parameter(torch.empty(output_size)))


class Norm(nn.Module):
    """Parameters of te.pytorch.RMSNorm."""

    def __init__(self, config, hidden_size, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))


class Nothing(nn.Module):
    """A module without parameters."""

    def __init__(self, *_, **__):
        super().__init__()


def provider():
    """Which of TransformerEngine's modules Megatron puts where (TESpecProvider)."""
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    experts = MLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear)
    return SimpleNamespace(
        linear=lambda: Linear,
        column_parallel_linear=lambda: Linear,
        row_parallel_linear=lambda: Linear,
        fuse_layernorm_and_linear=lambda: True,
        column_parallel_layer_norm_linear=lambda: LayerNormLinear,
        layer_norm=lambda rms_norm=False, for_qk=False: Norm,
        core_attention=lambda: Nothing,
        grouped_mlp_modules=lambda *_: (TEGroupedMLP, experts),
        activation_func=lambda: Nothing,
    )


def engine_model(hf_config, monkeypatch, *, of_megatron):
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer import multi_latent_attention

    monkeypatch.setattr(multi_latent_attention, "TELinear", Linear)
    monkeypatch.setattr(gpt_layer_specs, "TESpecProvider", provider, raising=False)
    family = family_of(hf_config)
    config = transformer_config(hf_config, RunConfig())
    config.transformer_impl = "transformer_engine"
    config.moe_grouped_gemm = config.num_moe_experts is not None
    mixture = {weight.layer for weight in family.weights.place(hf_config).values() if ".experts." in weight.megatron}

    def layer(i):
        experts = config.num_moe_experts if i in mixture else None
        return megatron_layer(config, experts, latent=config.multi_latent_attention)

    return GPTModel(
        config=config,
        transformer_layer_spec=block_spec(config, layer) if of_megatron else family.layer_spec(config, hf_config),
        vocab_size=padded_vocab_size(hf_config, 1),
        **family.gpt_model(hf_config),
    )


CASES = [(kind, False) for kind in KINDS] + [(family, True) for family in OF_MEGATRON]


@pytest.mark.parametrize(("model_type", "of_megatron"), CASES)
def test_layers_of_transformer_engine_hold_the_same_tensors(tmp_path, monkeypatch, model_type, of_megatron):
    reference = on_disk(save_tiny(tmp_path, model_type))
    local = {name: tuple(p.shape) for name, p in load(tmp_path).model.named_parameters()}
    hf_config = load_hf_config(tmp_path)
    loaded = Loaded(engine_model(hf_config, monkeypatch, of_megatron=of_megatron), family_of(hf_config), hf_config)
    named = dict(loaded.model.named_parameters())
    assert any(name.endswith("layer_norm_weight") or ".experts.linear_fc1.weight0" in name for name in named)
    assert {table_name(name): tuple(parameter.shape) for name, parameter in named.items()} == local
    with torch.no_grad():
        for parameter in named.values():
            parameter.fill_(-7.0)
    load_hf_weights(loaded.model, loaded.family, hf_config, tmp_path)
    exported = dict(iter_hf_weights(loaded.model, loaded.family, hf_config))
    assert exported.keys() == reference.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in reference.items())


def test_names_that_both_have_stay_as_they_are():
    for name in (
        "embedding.word_embeddings.weight",
        "decoder.layers.3.pre_mlp_layernorm.weight",
        "decoder.layers.3.mlp.experts.local_experts.1.linear_fc1.weight",
        "decoder.layers.3.mlp.shared_experts.linear_fc1.weight",
    ):
        assert table_name(name) == name
