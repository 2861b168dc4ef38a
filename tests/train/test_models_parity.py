"""A model in Megatron computes what transformers computes: logits, gradients, packed sequences, padded vocabulary."""

from itertools import accumulate

import pytest
import torch
from torch.testing import assert_close

from tests.train.model_cases import EVERY_MODEL, KINDS, load, on_disk, save_tiny, tiny_model
from train.config.run import RunConfig
from train.config.sections import ModelConfig
from train.megatron.activation import SwiGLU
from train.megatron.norm import RMSNorm
from train.megatron.rotary import rotate, rotate_packed

pytestmark = pytest.mark.usefixtures("one_rank")


def some_tokens(batch: int = 3, length: int = 40, vocab_size: int = 67) -> torch.Tensor:
    return torch.randint(0, vocab_size, (batch, length), generator=torch.Generator().manual_seed(1))


def relative_difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest logit."""
    return float(((logits - expected).abs().max() / expected.abs().max()).detach())


@pytest.mark.parametrize(("model_type", "tied"), EVERY_MODEL)
def test_logits_and_gradients_equal_transformers(tmp_path, model_type, tied):
    reference = save_tiny(tmp_path, model_type, tied)
    loaded = load(tmp_path)
    tokens = some_tokens()

    expected = reference(tokens).logits
    logits = loaded.model(tokens, None, None)
    assert relative_difference(logits, expected) <= (1e-4 if loaded.family.experts(loaded.hf_config) else 1e-5)

    expected.square().mean().backward()
    logits.square().mean().backward()
    gradients = on_disk(reference, {name: parameter.grad for name, parameter in reference.named_parameters()})
    # The same table that maps weights maps their gradients.
    for parameter in loaded.model.parameters():
        parameter.data.copy_(parameter.grad)
    ours = loaded.tensors()
    assert gradients.keys() <= ours.keys()
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 0, f"{name} has no gradient to compare"
        assert_close(ours[name], gradient, rtol=1e-4, atol=2e-5, msg=lambda m, name=name: f"{name}: {m}")


QWEN_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
SCALED = [
    ("llama", QWEN_YARN),
    ("llama", QWEN_YARN | {"attention_factor": 0.7, "beta_fast": 8, "beta_slow": 2, "truncate": False}),
    ("qwen2", QWEN_YARN),
    ("qwen2_moe", QWEN_YARN),
    ("qwen3", QWEN_YARN),
    ("qwen3_moe", QWEN_YARN | {"mscale": 1.2, "mscale_all_dim": 0.5}),
    ("glm4", QWEN_YARN | {"partial_rotary_factor": 0.5}),
    ("glm4_moe", QWEN_YARN | {"partial_rotary_factor": 0.5}),
    ("minimax_m2", QWEN_YARN | {"partial_rotary_factor": 0.5}),
    ("minimax_m2", {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0, "partial_rotary_factor": 0.5}),
]


@pytest.mark.parametrize(("model_type", "rope"), SCALED)
def test_contexts_beyond_the_length_of_pretraining_give_the_logits_of_transformers(tmp_path, model_type, rope):
    reference = save_tiny(tmp_path, model_type, rope_parameters=dict(rope))
    loaded = load(tmp_path)
    tokens = some_tokens(2, 100)  # of which the pretrained model saw 16 at once
    with torch.no_grad():
        expected = reference(tokens).logits
        assert relative_difference(loaded.model(tokens, None, None), expected) <= 1e-5
        unscaled = tiny_model(model_type, rope_parameters=dict(rope) | {"rope_type": "default"})
        assert relative_difference(unscaled(tokens).logits, expected) > 1e-2


@pytest.mark.parametrize("model_type", ["qwen3", "glm4_moe"])
def test_a_scaled_rotary_embedding_is_the_same_for_packed_sequences(tmp_path, model_type):
    partial = {"partial_rotary_factor": 0.5} if model_type == "glm4_moe" else {}
    save_tiny(tmp_path, model_type, rope_parameters=QWEN_YARN | partial)
    packed, alone = packed_and_alone(load(tmp_path).model, (5, 40, 1))
    assert_close(packed, alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("model_type", KINDS)
def test_packed_sequences_give_the_logits_of_each_alone(tmp_path, model_type):
    save_tiny(tmp_path, model_type)
    packed, alone = packed_and_alone(load(tmp_path).model, (5, 17, 1))
    assert_close(packed, alone, rtol=0, atol=1e-5)


@torch.no_grad()
def packed_and_alone(model, lengths):
    """Logits of sequences in one packed batch, and of each by itself."""
    from megatron.core.packed_seq_params import PackedSeqParams

    sequences = [some_tokens(1, length) for length in lengths]
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    packing = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )  # fmt: skip
    packed = model(torch.cat(sequences, dim=1), None, None, packed_seq_params=packing)
    return packed, torch.cat([model(sequence, None, None) for sequence in sequences], dim=1)


def test_right_padding_changes_no_real_token(tmp_path):
    reference = save_tiny(tmp_path, "qwen3")
    model = load(tmp_path).model
    tokens = some_tokens(2, 12)
    with torch.no_grad():
        padded = model(torch.nn.functional.pad(tokens, (0, 9)), None, None)[:, :12]
        assert_close(padded, reference(tokens).logits, rtol=0, atol=1e-5)


def test_a_mask_is_refused_rather_than_ignored(tmp_path):
    save_tiny(tmp_path, "llama")
    model = load(tmp_path).model
    with pytest.raises(ValueError, match="attention_mask=None"):
        model(some_tokens(), None, torch.ones(1, 1, 40, 40, dtype=torch.bool).triu(1))


def test_bf16_parameters_and_logits_are_close_to_transformers_in_bf16(tmp_path):
    reference = save_tiny(tmp_path, "qwen3").bfloat16()
    loaded = load(tmp_path, RunConfig(model=ModelConfig(bf16=True)))
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        expected = reference(some_tokens()).logits.float()
        logits = loaded.model(some_tokens(), None, None).float()
    assert (logits - expected).abs().mean() < 0.02 * expected.abs().mean()


def double_gradients(function, *inputs):
    """Check a float32 autograd function against its plain formula's gradients in float64."""
    ours, plain = function
    narrow = [x.clone().requires_grad_() for x in inputs]
    wide = [x.double().requires_grad_() for x in inputs]
    result, expected = ours(*narrow), plain(*wide)
    assert_close(result.double(), expected, rtol=1e-5, atol=1e-6)
    gradient = torch.randn(result.shape, generator=torch.Generator().manual_seed(2))
    actual = torch.autograd.grad(result, narrow, gradient)
    for mine, theirs in zip(actual, torch.autograd.grad(expected, wide, gradient.double()), strict=True):
        assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-5)


class NormConfig:
    sequence_parallel = True


def test_norm_matches_its_formula_in_float64():
    norm = RMSNorm(NormConfig(), 24, eps=1e-3)
    assert norm.weight.sequence_parallel  # what makes Megatron sum its gradient over the ranks

    def ours(x, weight):
        return torch.func.functional_call(norm, {"weight": weight}, (x,))

    def plain(x, weight):
        return x * (x.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * weight

    generator = torch.Generator().manual_seed(0)
    double_gradients((ours, plain), torch.randn(5, 3, 24, generator=generator), torch.randn(24, generator=generator))


def test_swiglu_matches_its_formula_in_float64():
    class Config:
        gated_linear_unit = True
        activation_func = staticmethod(torch.nn.functional.silu)

    def plain(x):
        gate, up = x[..., :10], x[..., 10:]
        return gate * gate.sigmoid() * up

    x = torch.randn(4, 3, 20, generator=torch.Generator().manual_seed(0))
    double_gradients((SwiGLU(Config()), plain), x)


def test_rotation_matches_complex_multiplication_in_float64():
    angles = torch.randn(6, 1, 1, 5, generator=torch.Generator().manual_seed(0))
    both = torch.cat((angles, angles), dim=-1)

    def plain(x):
        turned = torch.complex(x[..., :5], x[..., 5:]) * torch.polar(torch.ones(()).double(), angles.double())
        return torch.cat((turned.real, turned.imag), dim=-1)

    x = torch.randn(6, 2, 3, 10, generator=torch.Generator().manual_seed(1))
    double_gradients((lambda x: rotate(x, both), plain), x)
    packed = rotate_packed(x[:, 0], torch.tensor([0, 4, 6]), both)
    assert_close(packed, torch.cat((rotate(x[:4], both[:4])[:, 0], rotate(x[4:], both[:2])[:, 0])))
