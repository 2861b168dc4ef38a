"""Decoding speed: the embedded rollout engine against ``transformers`` ``generate``, alternating in one process.

Both answer the same prompts with the same random model (Qwen3 architecture) and sample at temperature 1. Beside them:
the engine with requests arriving one by one instead of all at once, and with groups that share a prompt (as in
training); and the matrix products of the decode steps alone, which is the floor for any engine on this library.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # the event loop needs a core too: see the CPU backend's worker_env
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from accel import select_accelerator
from accel.modules import move_module
from benchmarks.harness import Spread, alternate, parser, ratios, report, table
from rollout.engines.protocol import GenerateRequest, SamplingParams
from rollout.engines.torch_engine import TorchEngine
from rollout.event_loop import EventLoopThread

GROUP = 8  # responses to one prompt in the grouped run
ENGINE, TRANSFORMERS, FLOOR = "embedded engine", "transformers generate", "linear layers only"
ARRIVING, GROUPED = "  arriving one by one", f"  {GROUP} responses a prompt"


@dataclass(frozen=True)
class Run:
    """New tokens per second of wall-clock time, and of CPU time."""

    per_second: float
    per_cpu_second: float


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
    inputs = [torch.randn(args.prompts, matrix.shape[1], device=matrix.device) for matrix in matrices]
    for _ in range(args.new_tokens):
        for states, matrix in zip(inputs, matrices, strict=True):
            F.linear(states, matrix)
    return args.prompts * args.new_tokens


def measure(args: argparse.Namespace, directory: Path) -> dict[str, list[Run]]:
    """Every contestant's runs, in turn."""
    accelerator = select_accelerator(args.accelerator)
    model = move_module(build_model(args, directory), accelerator.device())
    generator = torch.Generator().manual_seed(args.seed)
    ids = torch.randint(0, args.vocab, (args.prompts, args.prompt_len), generator=generator)
    on_device = ids.to(accelerator.device())
    prompts = [tuple(row) for row in ids.tolist()]
    groups = [prompts[index // GROUP] for index in range(len(prompts))]
    engine = TorchEngine(
        directory,
        accelerator,
        dtype=torch.float32,
        max_running_requests=args.prompts,
        max_context_len=args.prompt_len + args.new_tokens,
        threads=args.threads,
    )
    loop = EventLoopThread("decode-benchmark")
    loop.run(engine.start())
    contestants: dict[str, Callable[[], int]] = {
        ENGINE: lambda: loop.run(serve(engine, prompts, args, 0.0)),
        TRANSFORMERS: lambda: generate(model, on_device, args),
        ARRIVING: lambda: loop.run(serve(engine, prompts, args, args.gap_ms / 1000)),
        GROUPED: lambda: loop.run(serve(engine, groups, args, 0.0)),
        FLOOR: lambda: linear_layers(model, args),
    }
    for warm_up in contestants.values():
        warm_up()

    def timed(work: Callable[[], int]) -> Run:
        wall, cpu = time.perf_counter(), time.process_time()
        tokens = work()
        accelerator.synchronize()
        return Run(tokens / (time.perf_counter() - wall), tokens / (time.process_time() - cpu))

    sides = {name: lambda _repeat, work=work: timed(work) for name, work in contestants.items()}
    runs = alternate(sides, args.repeats)
    loop.run(engine.stop())
    loop.close()
    return runs


def main(argv: list[str] | None = None) -> None:
    flags = parser(__doc__, repeats=9)
    flags.add_argument("--accelerator", default="cpu", metavar="NAME", help="where both run (default: cpu)")
    flags.add_argument("--hidden", type=int, default=128)
    flags.add_argument("--layers", type=int, default=4)
    flags.add_argument("--vocab", type=int, default=1024)
    flags.add_argument("--prompts", type=int, default=64)
    flags.add_argument("--prompt-len", type=int, default=16)
    flags.add_argument("--new-tokens", type=int, default=32)
    flags.add_argument("--gap-ms", type=float, default=1.0, help="time between arrivals in the one-by-one run")
    flags.add_argument("--threads", type=int, default=torch.get_num_threads())
    flags.add_argument("--seed", type=int, default=0)
    args = flags.parse_args(argv)
    torch.set_num_threads(args.threads)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as directory:
        runs = measure(args, Path(directory))
    results, rows = {}, []
    for name, own in runs.items():
        speed = Spread.of([run.per_second for run in own])
        times = ratios([run.per_second for run in own], [run.per_second for run in runs[TRANSFORMERS]])
        cpu_times = ratios([run.per_cpu_second for run in own], [run.per_cpu_second for run in runs[TRANSFORMERS]])
        results[name.strip()] = {"tokens_per_second": speed, "times": times, "times_per_cpu_second": cpu_times}
        rows.append((name, f"{speed.median:,.0f}", times.text(), cpu_times.text()))
    title = (
        f"{args.prompts} prompts of {args.prompt_len} tokens x {args.new_tokens} new ones; hidden {args.hidden}, "
        f"{args.layers} layers, vocabulary {args.vocab}, fp32, "
        f"{args.accelerator}, {args.threads} thread(s); {args.repeats} runs"
    )
    header = ("", "tokens/s", "times transformers", "the same per CPU second")
    settings = {key: value for key, value in vars(args).items() if key != "json"}
    report("decode", {"settings": settings, "results": results}, table(title, header, rows), args.json)


if __name__ == "__main__":
    main()
