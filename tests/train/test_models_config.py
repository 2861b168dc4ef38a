"""Which Hugging Face configs are taken, and that what is not implemented is refused by name."""

import json

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from samples.errors import InputError
from tests.train.model_cases import LLAMA3_ROPE, tiny_config
from train.config.sections import ParallelConfig
from train.megatron.layout import check_layout, padded_vocab_size
from train.megatron.model import load_hf_config
from train.megatron.models import FAMILIES, family_of
from train.megatron.models.rope import rotary_scale

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_family_is_found_by_model_type(model_type):
    assert family_of(tiny_config(model_type)).model_type == model_type


@pytest.mark.parametrize(
    ("model_type", "field", "value"),
    [
        ("llama", "attention_bias", True),
        ("llama", "mlp_bias", True),
        ("llama", "hidden_act", "gelu"),
        ("llama", "attention_dropout", 0.1),
        ("llama", "rope_parameters", YARN | {"attention_factor": 0.0}),
        ("llama", "rope_parameters", YARN | {"original_max_position_embeddings": -16}),
        ("qwen3", "rope_parameters", YARN | {"factor": None}),
        ("qwen3", "rope_parameters", YARN | {"factor": 0.5}),
        ("qwen3", "rope_parameters", YARN | {"beta_fast": -1}),
        ("qwen2", "rope_parameters", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        ("qwen3", "rope_parameters", {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        ("qwen3", "attention_bias", True),
        ("glm4_moe", "norm_topk_prob", False),
        ("deepseek_v3", "rope_interleave", False),
        ("deepseek_v3", "rope_parameters", YARN),
        ("minimax_m2", "router_jitter_noise", 0.1),
        ("qwen3", "layer_types", ["full_attention", "sliding_attention"]),
        ("llama", "is_causal", False),
        ("qwen3", "per_layer_config", {1: {"rms_norm_eps": 0.5}}),
        ("gemma4_text", "per_layer_config", {1: {"rms_norm_eps": 0.5}}),
        ("gemma4_text", "per_layer_config", {1: {"head_dim": 16}}),
        ("gemma4_text", "rope_parameters", {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}),
        ("gemma4_text", "rope_parameters", {"full_attention": None, "sliding_attention": None}),
        ("gemma4_text", "global_head_dim", 7),
        ("gemma4_text/key is value", "num_global_key_value_heads", 3),
        ("gemma4_text", "final_logit_softcapping", 0.0),
        ("gemma4_text", "sliding_window", 0),
        ("gemma4_text/experts", "top_k_experts", 1),
        ("gpt_oss", "layer_types", ["chunked_attention", "full_attention"]),
        ("gpt_oss", "sliding_window", None),
        ("gpt_oss", "num_experts_per_tok", 1),
        ("gpt_oss", "rope_parameters", YARN | {"partial_rotary_factor": 0.5}),
        ("deepseek_v3", "rope_parameters", YARN | {"mscale": 1, "mscale_all_dim": 1, "partial_rotary_factor": 0.5}),
        ("deepseek_v3", "num_key_value_heads", 2),
        ("deepseek_v3", "first_k_dense_replace", None),
        ("deepseek_v3", "scoring_func", "softmax"),
        ("deepseek_v3", "moe_layer_freq", 2),
        ("deepseek_v3", "n_group", 3),
        ("deepseek_v3", "topk_group", 5),
        ("deepseek_v3", "kv_lora_rank", 0),
        ("glm4_moe", "routed_scaling_factor", 0.0),
        ("glm4_moe", "n_shared_experts", 0),
        ("glm4_moe", "n_group", 0),
        ("glm4_moe", "first_k_dense_replace", -1),
        ("glm4_moe", "topk_group", 0),
        ("qwen2_moe", "num_key_value_heads", None),
        ("minimax_m2", "attn_type_list", 3),
        ("glm4_moe", "n_routed_experts", 2**40),
        ("glm4_moe_lite", "mlp_layer_types", ["sparse"]),
        ("qwen3_moe", "num_experts_per_tok", 5),
        ("qwen3_moe", "num_experts", 0),
        ("qwen3_moe", "decoder_sparse_step", 0),
        ("qwen2_moe", "moe_intermediate_size", 0),
        ("minimax_m2", "use_qk_norm", False),
        ("minimax_m2", "attn_type_list", [1, 0]),
    ],
)
def test_a_field_that_is_not_implemented_is_refused_by_name(model_type, field, value):
    with pytest.raises(InputError, match=field.replace("global_", "")) as refusal:
        family_of(tiny_config(model_type, **{field: value}), "--ref-load x")
    assert "--ref-load x" in str(refusal.value)
    if value != 2**40:  # refused before it is known whose size it is
        assert model_type.partition("/")[0] in str(refusal.value)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe", "glm4_moe_lite", "minimax_m2", "qwen3_moe"])
def test_a_single_expert_whose_weight_would_be_renormalised_is_refused(model_type):
    groups = {"n_group": 1, "topk_group": 1} if model_type == "deepseek_v3" else {}
    with pytest.raises(InputError, match=r"num_experts_per_tok=1: .*renormalised"):
        family_of(tiny_config(model_type, num_experts_per_tok=1, **groups))
    family_of(tiny_config("qwen3_moe", num_experts_per_tok=1, norm_topk_prob=False))


def test_heads_of_latent_attention_need_not_divide_the_hidden_size(tmp_path):
    tiny_config("glm4_moe_lite", hidden_size=36, num_attention_heads=5, num_key_value_heads=5).save_pretrained(tmp_path)
    assert family_of(load_hf_config(tmp_path)).model_type == "glm4_moe_lite"  # GLM-4.7-Flash: 20 heads of 2048
    with pytest.raises(InputError, match="qk_rope_head_dim"):
        family_of(tiny_config("glm4_moe_lite", qk_rope_head_dim=3))


@pytest.mark.parametrize(("field", "extra"), [("num_nextn_predict_layers", 2), ("num_mtp_modules", 3)])
def test_layers_that_predict_further_tokens_are_read_over_by_the_name_that_counts_them(field, extra):
    from train.megatron.models.mixture import layers_beyond

    assert len(layers_beyond(tiny_config("minimax_m2", **{field: extra}))) == extra


def test_sliding_window_is_refused_where_a_layer_uses_it():
    sliding = {"use_sliding_window": True, "sliding_window": 16}
    with pytest.raises(InputError, match=r"layer_types.*sliding_attention"):
        family_of(tiny_config("qwen2", **sliding, max_window_layers=1))
    family_of(tiny_config("qwen2", **sliding, max_window_layers=2))  # of two layers: none slides


def test_a_field_of_a_newer_transformers_is_refused_unless_at_its_default():
    from dataclasses import dataclass

    base = type(tiny_config("llama"))

    @dataclass
    class Newer(base):
        model_type = "llama"
        logit_softcap: float | None = None

    family_of(Newer())
    with pytest.raises(InputError, match=r"logit_softcap=30"):
        family_of(Newer(logit_softcap=30.0))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            {"model_type": "mistral"},
            r"'mistral' is not supported.*deepseek_v3, gemma4_text, .*kimi_k2, llama, .*qwen3_moe",
        ),
        ({"model_type": "qwen4"}, r"nearest: qwen"),
        ({"model_type": "qwen2_5_vl", "vision_config": {}}, "is multimodal"),
        ({"model_type": "llama", "text_config": {}}, "is multimodal"),
        ({}, "model_type None"),
        ([1], "holds a list"),
        ({"model_type": "llama", "hidden_size": "wide"}, "cannot read"),
        ({"model_type": "gpt_oss", "swiglu_alpha": float("nan")}, "swiglu_alpha=nan is not a finite number"),
        ({"model_type": "deepseek_v3", "routed_scaling_factor": float("inf")}, "routed_scaling_factor=inf"),
        ({"model_type": "llama", "rope_parameters": {"factor": float("inf")}}, r"rope_parameters\['factor'\]=inf"),
        ({"model_type": "llama", "rope_parameters": YARN | {"original_max_position_embeddings": 0}}, "cannot read"),
    ],
)
def test_config_file_that_cannot_be_used_is_one_clear_error(tmp_path, raw, message):
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(InputError, match=message):
        load_hf_config(tmp_path)


def test_missing_or_broken_config_file_names_the_directory(tmp_path):
    with pytest.raises(InputError, match=r"--hf-checkpoint.*no config\.json"):
        load_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        load_hf_config(tmp_path)


def test_quantised_and_non_causal_checkpoints_are_refused():
    with pytest.raises(InputError, match="quantised"):
        family_of(tiny_config("llama", quantization_config={"quant_method": "fp8"}))
    with pytest.raises(InputError, match="LlamaForSequenceClassification"):
        family_of(tiny_config("llama", architectures=["LlamaForSequenceClassification"]))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e6},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        LLAMA3_ROPE,
        LLAMA3_ROPE | {"low_freq_factor": 2.0, "high_freq_factor": 16.0, "factor": 32.0},
        YARN,
        YARN | {"beta_fast": 8, "beta_slow": 2, "truncate": False, "rope_theta": 1e6},
    ],
)
def test_rotary_frequencies_equal_transformers_bit_for_bit(rope):
    config = tiny_config("llama", rope_parameters=rope, head_dim=64)
    ours = FAMILIES["llama"].inverse_frequencies(config)
    if rope["rope_type"] == "default":
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        expected = LlamaRotaryEmbedding(config).inv_freq
    else:
        expected, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
        assert scaling == rotary_scale(config)
    assert torch.equal(ours, expected)


@pytest.mark.parametrize(
    ("parallel", "flag"),
    [
        ({"tensor_model_parallel_size": 3}, "--tensor-model-parallel-size 3"),
        ({"tensor_model_parallel_size": 4}, "num_key_value_heads=2"),
        ({"pipeline_model_parallel_size": 4}, "--pipeline-model-parallel-size 4"),
        ({"context_parallel_size": 2}, "--context-parallel-size 2"),
        ({"expert_model_parallel_size": 2}, "--expert-model-parallel-size 2"),
        ({"sequence_parallel": True}, "--sequence-parallel"),
    ],
)
def test_layout_that_does_not_divide_is_refused_by_flag(parallel, flag):
    with pytest.raises(InputError, match=flag):
        check_layout(tiny_config("qwen3"), ParallelConfig(**parallel))
    check_layout(tiny_config("qwen3"), ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True))


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        ({"expert_model_parallel_size": 3}, "--expert-model-parallel-size 3 does not divide the model's 4 experts"),
        ({"tensor_model_parallel_size": 2}, "needs --sequence-parallel"),
        ({"tensor_model_parallel_size": 4, "sequence_parallel": True}, "num_key_value_heads=2"),
    ],
)
def test_layout_that_does_not_divide_a_mixture_is_refused_by_flag(parallel, said):
    with pytest.raises(InputError, match=said):
        check_layout(tiny_config("qwen3_moe"), ParallelConfig(**parallel))


def test_heads_of_every_kind_of_layer_have_to_divide():
    with pytest.raises(InputError, match=r"num_key_value_heads of full_attention layers=2"):
        check_layout(tiny_config("gemma4_text/key is value"), ParallelConfig(tensor_model_parallel_size=4))
    check_layout(tiny_config("gemma4_text"), ParallelConfig(tensor_model_parallel_size=4))


def test_groups_of_experts_that_megatron_rates_otherwise_are_refused():
    with pytest.raises(InputError, match=r"best num_experts_per_tok // topk_group \(2 // 2\)"):
        family_of(tiny_config("deepseek_v3", num_experts_per_tok=2))


def test_vocabulary_is_padded_to_the_tensor_parallel_size():
    config = tiny_config("qwen3")
    assert [padded_vocab_size(config, size) for size in (1, 2, 4)] == [67, 68, 68]
