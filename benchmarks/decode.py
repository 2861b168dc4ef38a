"""Decoding speed: the embedded rollout engine against ``transformers`` ``generate``, alternating in one process.

    python benchmarks/decode.py [--threads N] [--rounds N] [--json FILE]

Both answer the same prompts with the same random model (Qwen3 architecture) and sample at temperature 1. Beside them
stand the time that the linear layers alone would take (the floor for any engine built on the same matrix library), and
the engine with requests arriving one by one instead of all at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # the event loop needs a core too: see the CPU backend's worker_env
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from accel import select_accelerator
from rollout.engines.protocol import GenerateRequest, SamplingParams
from rollout.engines.torch_engine import TorchEngine

ENGINE, ARRIVING, TRANSFORMERS, FLOOR = (
    "embedded engine",
    "  arriving one by one",
    "transformers generate",
    "linear layers only",
)


def build_model(args: argparse.Namespace, directory: Path) -> Qwen3ForCausalLM:
    """A random model and a character tokenizer, saved to ``directory``."""
    torch.manual_seed(args.seed)
    config = Qwen3Config(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=max(1, args.hidden // 32),
        num_key_value_heads=max(1, args.hidden // 64),
        head_dim=32,
        max_position_embeddings=args.prompt_len + args.new_tokens,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    model = Qwen3ForCausalLM(config).eval()
    model.save_pretrained(directory)
    vocabulary = {chr(0x100 + index): index for index in range(args.vocab)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=chr(0x100)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    return model


async def serve(engine: TorchEngine, prompts: list[tuple[int, ...]], args: argparse.Namespace, gap: float) -> int:
    """Answer all prompts, ``gap`` seconds between arrivals; the number of new tokens."""
    params = SamplingParams(max_new_tokens=args.new_tokens, ignore_eos=True)

    async def one(index: int) -> int:
        if gap:
            await asyncio.sleep(index * gap)
        request = GenerateRequest(str(index), prompts[index], params, seed=0, rollout_id=0, sample_index=index)
        return len((await engine.generate(request)).output_ids)

    return sum(await asyncio.gather(*(one(index) for index in range(len(prompts)))))


@torch.inference_mode()
def generate(model: Qwen3ForCausalLM, prompts: torch.Tensor, args: argparse.Namespace) -> int:
    output = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=args.new_tokens,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        pad_token_id=0,
    )
    return output.numel() - prompts.numel()


@torch.inference_mode()
def linear_layers(model: Qwen3ForCausalLM, args: argparse.Namespace) -> int:
    """The matrix products of as many decode steps as there are new tokens, fused like the engine's."""
    layers = model.model.layers
    matrices = []
    for layer in layers:
        attention, mlp = layer.self_attn, layer.mlp
        matrices += [
            torch.cat((attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)),
            attention.o_proj.weight,
            torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)),
            mlp.down_proj.weight,
        ]
    matrices.append(model.lm_head.weight)
    inputs = [torch.randn(args.prompts, matrix.shape[1]) for matrix in matrices]
    for _ in range(args.new_tokens):
        for states, matrix in zip(inputs, matrices, strict=True):
            F.linear(states, matrix)
    return args.prompts * args.new_tokens


async def measure(args: argparse.Namespace, directory: Path) -> dict[str, list[float]]:
    """Tokens per second of every contestant, one value a round; the order turns from round to round."""
    model = build_model(args, directory)
    ids = torch.randint(
        0, args.vocab, (args.prompts, args.prompt_len), generator=torch.Generator().manual_seed(args.seed)
    )
    prompts = [tuple(row) for row in ids.tolist()]
    engine = TorchEngine(
        directory,
        select_accelerator("cpu"),
        dtype=torch.float32,
        max_running_requests=args.prompts,
        max_context_len=args.prompt_len + args.new_tokens,
        threads=args.threads,
    )
    await engine.start()

    async def timed(work: Callable[[], Any]) -> float:
        start = time.perf_counter()
        tokens = work()
        if asyncio.iscoroutine(tokens):
            tokens = await tokens
        return tokens / (time.perf_counter() - start)

    contestants: dict[str, Callable[[], Any]] = {
        ENGINE: lambda: serve(engine, prompts, args, 0.0),
        TRANSFORMERS: lambda: generate(model, ids, args),
        ARRIVING: lambda: serve(engine, prompts, args, args.gap_ms / 1000),
        FLOOR: lambda: linear_layers(model, args),
    }
    speeds: dict[str, list[float]] = {name: [] for name in contestants}
    for round_index in range(-1, args.rounds):
        order = list(contestants) if round_index % 2 else list(reversed(contestants))
        for name in order:
            speed = await timed(contestants[name])
            if round_index >= 0:  # the first round warms up
                speeds[name].append(speed)
    await engine.stop()
    return speeds


def spread(values: list[float]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def report(speeds: dict[str, list[float]], args: argparse.Namespace) -> dict[str, Any]:
    """Print the table; the same figures as a mapping."""
    rows = {}
    print(
        f"{args.prompts} prompts x {args.new_tokens} new tokens, hidden {args.hidden}, {args.layers} layers, fp32, ",
        end="",
    )
    print(f"vocabulary {args.vocab}, {args.threads} thread(s), {args.rounds} rounds; arrivals {args.gap_ms:g} ms apart")
    print(f"{'':24}{'tokens/s (median)':>18}{'times transformers, per round: min':>37}{'median':>8}{'max':>8}")
    for name, values in speeds.items():
        ratio = spread([value / base for value, base in zip(values, speeds[TRANSFORMERS], strict=True)])
        rows[name.strip()] = {"tokens_per_second": spread(values), "ratio": ratio}
        print(
            f"{name:24}{statistics.median(values):>18,.0f}{ratio['min']:>37.2f}{ratio['median']:>8.2f}{ratio['max']:>8.2f}"
        )
    return {"settings": {key: value for key, value in vars(args).items() if key != "json"}, "results": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt-len", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--gap-ms", type=float, default=1.0, help="time between arrivals in the one-by-one run")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="also write the figures there")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as directory:
        speeds = asyncio.run(measure(args, Path(directory)))
    figures = report(speeds, args)
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
