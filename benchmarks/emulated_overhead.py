"""What the emulated MUSA device costs: a training step on it against the same step on the host, side by side.

    python -m benchmarks.emulated_overhead [--repeats N]

CPU time of one process with one thread; the two sides take turns, and the ratio is of their medians. It says how much
slower tests on the emulation are, and nothing about any hardware.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from accel import select_accelerator
from accel.modules import move_module


def make_step(device: torch.device, args: argparse.Namespace) -> Callable[[], float]:
    """One step of a small Qwen3: forward, backward, clipping, AdamW."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=args.hidden // 4,
        attn_implementation="eager",  # the same operators on both
    )
    model = move_module(Qwen3ForCausalLM(config), device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    tokens = torch.randint(0, 1024, (8, 64)).to(device)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("--hidden", type=int, default=128)
    flags.add_argument("--layers", type=int, default=4)
    flags.add_argument("--repeats", type=int, default=15)
    args = flags.parse_args()
    torch.set_num_threads(1)
    accelerator = select_accelerator("musa", emulate=True)
    steps = {"cpu": make_step(torch.device("cpu"), args), "musa-emulated": make_step(accelerator.device(), args)}
    losses: dict[str, list[float]] = {side: [] for side in steps}
    times: dict[str, list[float]] = {side: [] for side in steps}
    for repeat in range(args.repeats + 2):
        for side, step in steps.items():
            started = time.process_time()
            losses[side].append(step())
            if repeat >= 2:  # the first two warm up
                times[side].append(time.process_time() - started)
    medians = {side: statistics.median(values) for side, values in times.items()}
    difference = max(abs(a - b) / abs(a) for a, b in zip(losses["cpu"], losses["musa-emulated"], strict=True))
    result = {
        "ms per step": {side: round(1000 * value, 2) for side, value in medians.items()},
        "musa-emulated / cpu": round(medians["musa-emulated"] / medians["cpu"], 3),
        "largest relative difference of a loss": difference,
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
