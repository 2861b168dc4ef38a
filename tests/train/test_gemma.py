"""Gemma 4: training as transformers and AdamW do it, the order of its router's steps, and the cap on its logits."""

import pytest
import torch
from torch.testing import assert_close

from samples.errors import InputError
from tests.train.model_cases import load, save_tiny, tiny_config
from tests.train.test_trainer import assert_equal_training, batches_of
from tests.train.trainer_cases import VOCABULARY, run_config
from train.config.run import RunConfig
from train.megatron.model import transformer_config
from train.megatron.models import family_of

FORMS = (
    pytest.param("gemma4_text", marks=pytest.mark.slow),
    pytest.param("gemma4_text/key is value", marks=pytest.mark.slow),
    "gemma4_text/experts",
)


@pytest.mark.parametrize("form", FORMS)
def test_five_steps_equal_transformers_with_adamw(tmp_path, cpu_megatron, form):
    save_tiny(tmp_path, form, tied=True, vocab_size=VOCABULARY)
    config = run_config(tmp_path, algorithm={"entropy_coef": 0.01}, job={"num_rollout": 5})
    assert_equal_training(config, batches_of(tmp_path, 5))


def a_router(per_expert_scale: list[float], top_k: int):
    """One whose logits are the (scaled) elements of the normed residual."""
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    from train.megatron.gemma import GemmaRouter

    hf_config = tiny_config("gemma4_text/experts", hidden_size=4, num_attention_heads=4, top_k_experts=top_k)
    router = GemmaRouter(transformer_config(hf_config, RunConfig()), get_default_pg_collection())
    with torch.no_grad():
        router.weight.copy_(torch.eye(4))
        router.per_expert_scale.copy_(torch.tensor(per_expert_scale))
    return router


def test_chosen_weights_are_renormalised_before_each_expert_scales_its_own(one_rank):
    scale = torch.tensor([3.0, 5.0, 7.0, 11.0])
    residual = torch.tensor([[[4.0, 2.0, 1.0, 0.5]]])
    weights, chosen = a_router(scale.tolist(), top_k=2)(residual)
    normed = residual[0, 0] / residual[0, 0].square().mean().sqrt() * 4**-0.5
    probabilities = normed.softmax(0)[:2]
    assert chosen[0].tolist() == [True, True, False, False]
    assert_close(weights[0, :2], probabilities / probabilities.sum() * scale[:2], rtol=1e-5, atol=0)
    # The other order would cancel a scale that all share, and any scale where one expert is chosen.
    doubled, _ = a_router((2 * scale).tolist(), top_k=2)(residual)
    assert_close(doubled, 2 * weights)


def test_soft_cap_matches_its_formula_in_place(cpu_megatron):
    from train.megatron.gemma import SoftCap

    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)) * 4
    wide = logits.double().requires_grad_()
    expected = 3.0 * (wide / 3.0).tanh()
    leaf = logits.clone().requires_grad_()
    memory = leaf * 1.0
    capped = SoftCap.apply(memory, 3.0)
    assert capped.data_ptr() == memory.data_ptr()
    assert_close(capped.double(), expected, rtol=1e-5, atol=1e-6)
    gradient = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
    (ours,) = torch.autograd.grad(capped, leaf, gradient)
    (theirs,) = torch.autograd.grad(expected, wide, gradient.double())
    assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("field", ["hidden_size_per_layer_input", "num_kv_shared_layers"])
def test_forms_that_are_not_implemented_are_refused_by_name(field):
    with pytest.raises(InputError, match=field):
        family_of(tiny_config("gemma4_text", **{field: 2}))


def test_embedding_is_scaled_once(one_rank, tmp_path):
    reference = save_tiny(tmp_path, "gemma4_text", tied=True)
    model = load(tmp_path).model
    tokens = torch.arange(6)[None]
    embedded = model.embedding(tokens, None)
    assert_close(embedded.transpose(0, 1), reference.model.embed_tokens(tokens))
