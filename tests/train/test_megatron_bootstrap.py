"""Megatron-Core as prepare_megatron leaves it, in processes of its own: the hook is for the life of a process."""

import os
import socket
import subprocess
import sys
import textwrap

import pytest

PRELUDE = """
import warnings
warnings.simplefilter("error", UserWarning)
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accel.backends.cpu import CpuAccelerator
from train.megatron.bootstrap import prepare_megatron

cuda_before = dict(vars(torch.cuda))
prepare_megatron(CpuAccelerator())
prepare_megatron(CpuAccelerator())
torch.set_num_threads(1)

from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

HIDDEN, HEADS, GROUPS, HEAD_DIM, FFN, VOCAB, SEQUENCE = 32, 4, 2, 8, 48, 64, 16

def start(tensor_parallel_size):
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_parallel_size)
    tensor_parallel.model_parallel_cuda_manual_seed(1)

def build(experts=None, **overrides):
    settings = dict(
        num_layers=2, hidden_size=HIDDEN, num_attention_heads=HEADS, num_query_groups=GROUPS, kv_channels=HEAD_DIM,
        ffn_hidden_size=FFN, use_cpu_initialization=True, normalization="RMSNorm", gated_linear_unit=True,
        activation_func=F.silu, add_bias_linear=False, qk_layernorm=True, layernorm_epsilon=1e-6,
        hidden_dropout=0.0, attention_dropout=0.0,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
    )
    if experts:
        settings.update(num_moe_experts=experts, moe_router_topk=2, moe_ffn_hidden_size=FFN, moe_grouped_gemm=False,
                        moe_router_load_balancing_type="none")
    config = TransformerConfig(**(settings | overrides))
    spec = get_gpt_layer_local_spec(num_experts=experts, moe_grouped_gemm=False, qk_layernorm=True,
                                    normalization="RMSNorm")
    return GPTModel(config=config, transformer_layer_spec=spec, vocab_size=VOCAB, max_sequence_length=SEQUENCE,
                    share_embeddings_and_output_weights=False, position_embedding_type="rope", rotary_base=10000,
                    parallel_output=True)

ids = torch.randint(0, VOCAB, (2, SEQUENCE), generator=torch.Generator().manual_seed(0))
positions = torch.arange(SEQUENCE).expand(2, -1)
causal = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)[None, None]
"""


def run_ranks(script: str, world_size: int = 1) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    command = [sys.executable, "-c", PRELUDE + textwrap.dedent(script)]
    ranks = [
        subprocess.Popen(command, env=env | {"RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(world_size)
    ]
    for rank in ranks:
        _, errors = rank.communicate()
        assert rank.returncode == 0, errors
        assert "Apex" not in errors
        assert "RNG" not in errors


def test_gpt_model_trains_on_the_host_like_the_reference() -> None:
    run_ranks(
        """
        from transformers import Qwen3Config, Qwen3ForCausalLM

        start(1)
        torch.manual_seed(0)
        reference = Qwen3ForCausalLM(Qwen3Config(
            vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=2, num_attention_heads=HEADS,
            num_key_value_heads=GROUPS, head_dim=HEAD_DIM, rope_theta=10000.0, tie_word_embeddings=False,
            attn_implementation="eager"))
        source = reference.state_dict()
        names = {"embedding.word_embeddings.weight": "model.embed_tokens.weight",
                 "output_layer.weight": "lm_head.weight", "decoder.final_layernorm.weight": "model.norm.weight"}
        model = build()
        target = dict(model.named_parameters())
        for layer in range(2):
            ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
            names |= {
                ours + "input_layernorm.weight": theirs + "input_layernorm.weight",
                ours + "pre_mlp_layernorm.weight": theirs + "post_attention_layernorm.weight",
                ours + "self_attention.linear_proj.weight": theirs + "self_attn.o_proj.weight",
                ours + "self_attention.q_layernorm.weight": theirs + "self_attn.q_norm.weight",
                ours + "self_attention.k_layernorm.weight": theirs + "self_attn.k_norm.weight",
                ours + "mlp.linear_fc2.weight": theirs + "mlp.down_proj.weight",
            }
            parts = [source[theirs + f"self_attn.{part}_proj.weight"].view(GROUPS, -1, HIDDEN) for part in "qkv"]
            gates = [source[theirs + f"mlp.{part}_proj.weight"] for part in ("gate", "up")]
            with torch.no_grad():
                target[ours + "self_attention.linear_qkv.weight"].copy_(torch.cat(parts, 1).reshape(-1, HIDDEN))
                target[ours + "mlp.linear_fc1.weight"].copy_(torch.cat(gates))
        with torch.no_grad():
            for ours, theirs in names.items():
                target[ours].copy_(source[theirs])

        logits, expected = model(ids, positions, causal), reference(ids).logits
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6)
        for output in (logits, expected):
            F.cross_entropy(output.flatten(0, 1), ids.flatten()).backward()
        gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
        for ours, theirs in names.items():
            torch.testing.assert_close(target[ours].grad, gradients[theirs], rtol=1e-4, atol=1e-7)

        # Experts: the router needs no TransformerEngine, and both dispatchers compute the same.
        gathered = build(experts=4, moe_token_dispatcher_type="allgather")
        exchanged = build(experts=4, moe_token_dispatcher_type="alltoall")
        exchanged.load_state_dict(gathered.state_dict())
        outputs = [model(ids, positions, causal) for model in (gathered, exchanged)]
        torch.testing.assert_close(*outputs, rtol=0, atol=1e-6)
        for output in outputs:
            output.square().mean().backward()
        for one, other in zip(gathered.parameters(), exchanged.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-7)

        # Random states are the host generator's: a fork draws its own numbers and leaves the others' sequence alone.
        def draw(times):
            tensor_parallel.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
            with tensor_parallel.get_cuda_rng_tracker().fork():
                forked = [torch.rand(4) for _ in range(times)]
            return forked[0], torch.rand(4)
        (first, after), (second, after_more) = draw(1), draw(9)
        assert torch.equal(first, second) and torch.equal(after, after_more) and not torch.equal(first, after)

        # torch itself loads parts of torch.cuda lazily; what was there is what is there.
        assert all(vars(torch.cuda)[name] is value for name, value in cuda_before.items())
        assert not torch.cuda.is_initialized()
        dist.destroy_process_group()
        """
    )


@pytest.mark.slow
def test_sequence_parallel_gradients_equal_those_of_the_whole_sequence() -> None:
    run_ranks(
        """
        from megatron.core.distributed import (
            DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads)

        start(2)
        def gradients(sequence_parallel, weights=None):
            model = build(sequence_parallel=sequence_parallel)
            if weights is not None:
                model.load_state_dict(weights)
            for name, parameter in model.named_parameters():
                if "layernorm" in name:
                    assert parameter.sequence_parallel is sequence_parallel
            wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
            output = wrapped(ids, positions, causal)
            logits, labels = output.transpose(0, 1).contiguous(), ids.t().contiguous()
            tensor_parallel.vocab_parallel_cross_entropy(logits, labels).mean().backward()
            finalize_model_grads([wrapped])
            return model.state_dict(), {name: value.main_grad for name, value in model.named_parameters()}

        weights, whole = gradients(sequence_parallel=False)
        _, sliced = gradients(sequence_parallel=True, weights=weights)
        for name, gradient in whole.items():
            torch.testing.assert_close(sliced[name], gradient, rtol=1e-4, atol=1e-7, msg=lambda text: f"{name}: {text}")
        dist.destroy_process_group()
        """,
        world_size=2,
    )
