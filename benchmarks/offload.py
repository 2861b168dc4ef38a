"""What each side of a run holds while the other has its turn: a whole run with --colocate --offload, under Ray.

    python -m benchmarks.offload [--accelerator cpu|musa] [--parameters MILLIONS]

A random Qwen3 (default: 200 million parameters on cpu, 20 million on the emulated musa) makes two steps. For trainer
and rollout worker the memory of their own turn and of the other's is printed, and the share that stays. On cpu it is
the process's private and shared memory, less what a process holds that only imported the same modules (and Ray); on a
device it is what its allocator says is allocated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, hand_back, in_process, report, table

HIDDEN = 1024
IMPORTS = {
    "trainer": ("ray", "train.roles", "train.megatron.trainer", "transformers.models.qwen3.modeling_qwen3"),
    "rollout": (
        "ray",
        "train.roles",
        "transformers.models.qwen3.modeling_qwen3",
        "rollout.engines.torch_engine.engine",
    ),
}
OWN = {"trainer": "training", "rollout": "generating"}
OTHERS = {"trainer": "generating", "rollout": "training"}


def write_model(directory: Path, parameters: int, seed: int = 0) -> int:
    """A random Qwen3 with the built-in example's tokenizer and prompts; returns its parameters."""
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from train.example import model_config, write_example

    files = write_example(directory, seed)
    hidden = HIDDEN if parameters > 50_000_000 else HIDDEN // 4
    heads = hidden // 64
    a_layer = 2 * hidden * hidden + hidden * hidden + 9 * hidden * hidden
    shape = {
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": max(1, round(parameters / a_layer)),
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": 64,
    }
    config = model_config() | shape
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**config))
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    (files.hf_checkpoint / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, files.hf_checkpoint / "model.safetensors", {"format": "pt"})
    return sum(tensor.numel() for tensor in tensors.values())


def level_after_import(side: str) -> dict[str, Any]:
    """Bytes of a process that imported what the side's worker does, and did nothing else."""
    import importlib

    from accel import select_accelerator
    from train.megatron.bootstrap import prepare_megatron

    accelerator = select_accelerator("cpu")
    if side == "trainer":
        prepare_megatron(accelerator)
    for name in IMPORTS[side]:
        importlib.import_module(name)
    return {"bytes": accelerator.memory_info().allocated}


def run(directory: Path, accelerator: str) -> dict[str, float]:
    """The second step's metrics of a colocated run."""
    files = directory / "run"
    command = [
        *(
            sys.executable,
            "-m",
            "train",
            "--accelerator",
            accelerator,
            *(["--emulate"] if accelerator == "musa" else []),
        ),
        *("--colocate", "--offload", "--num-rollout", "2", "--rollout-batch-size", "2", "--n-samples-per-prompt", "4"),
        *("--hf-checkpoint", str(directory / "model"), "--prompt-data", str(directory / "prompts.jsonl")),
        *("--label-key", "label", "--rm-type", "exact_match", "--rollout-max-response-len", "4"),
        *("--output-dir", str(files), "--progress", "off"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    metrics: dict[str, float] = json.loads((files / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    return metrics


def measure(accelerator: str, millions: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="accelrl-offload-") as name:
        directory = Path(name)
        # In a process of its own, whose memory goes with it.
        counted = in_process("benchmarks.offload", "--write", str(directory), "--parameters", str(millions))
        metrics = run(directory, accelerator)
    sides = {}
    for side in IMPORTS:
        level = 0.0
        if accelerator == "cpu":
            level = float(in_process("benchmarks.offload", "--level", side)["bytes"])
        own = metrics[f"memory/{side}/{OWN[side]}"] - level
        others = metrics[f"memory/{side}/{OTHERS[side]}"] - level
        sides[side] = {"after_import": level, "own_turn": own, "other_turn": others, "share": others / own}
    return {"accelerator": accelerator, "parameters": counted["parameters"], "sides": sides}


def main(argv: list[str] | None = None) -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--accelerator", choices=("cpu", "musa"), default="cpu")
    flags.add_argument("--parameters", type=float, default=None, help="of the model, in millions")
    flags.add_argument("--json", type=Path, default=None, metavar="FILE", help="also write the results there")
    flags.add_argument("--write", type=Path, default=None, help=argparse.SUPPRESS)
    flags.add_argument("--level", choices=tuple(IMPORTS), default=None, help=argparse.SUPPRESS)
    args = flags.parse_args(argv)
    millions = args.parameters or (200.0 if args.accelerator == "cpu" else 20.0)
    if args.write is not None:
        hand_back({"parameters": write_model(args.write, int(1e6 * millions))})
        return 0
    if args.level is not None:
        hand_back(level_after_import(args.level))
        return 0
    result = measure(args.accelerator, millions)
    rows = [
        [side, *(mib(figures[key]) for key in ("after_import", "own_turn", "other_turn")), f"{figures['share']:.2%}"]
        for side, figures in result["sides"].items()
    ]
    title = f"{args.accelerator}, {result['parameters'] / 1e6:.0f} million parameters; MiB above the level after import"
    header = ["side", "level", "in its own turn", "in the other's", "stays"]
    report("offload", result, table(title, header, rows), args.json)
    return 0


def mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:.2f}"


if __name__ == "__main__":
    sys.exit(main())
