"""One whole step of reinforcement learning against TRL's GRPOTrainer: rollout, reward, training, weight hand-over.

Run ``python -m benchmarks.rl_step``. Both sides have the same model (Qwen3, hidden 128, 4 layers, random weights), the
same prompts, group size and number of responses, the same reward function, the same optimizer steps on them, and the
same number of threads. Every response has exactly ``--new-tokens`` tokens: the end of sequence is never sampled before.
Prompts all have the same length, so nobody pads. Every run is a process of its own that takes ``--steps`` steps after
two that are not counted; the sides take turns. Ours runs in one process (``--launcher inline``); TRL's settings are
said in ``benchmarks/trl_grpo.py``.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import Spread, alternate, hand_back, in_process, parser, ratios, report, table

MODULE = "benchmarks.rl_step"
SIDES = ("accelrl", "TRL")
UNCOUNTED_STEPS = 2
GROUPS, GROUP_SIZE, OPTIMIZER_STEPS = 16, 8, 2
PROMPT_LEN = 32


def score_response(response: str) -> float:
    """The reward of both sides: the share of even digits."""
    return sum(character in "02468" for character in response) / max(len(response), 1)


def reward(_args: Any, sample: Any) -> float:
    """``score_response`` as ``--custom-rm-path`` wants it."""
    return score_response(sample.response)


def write_inputs(directory: Path) -> tuple[Path, Path]:
    """The model's directory and the prompt file: the example's tokenizer under a larger model."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from train.example import model_config, write_example

    files = write_example(directory / "example", seed=0)
    torch.manual_seed(0)
    shape = {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
    }
    Qwen3ForCausalLM(Qwen3Config(**(model_config() | shape))).save_pretrained(files.hf_checkpoint)
    digits = random.Random(0)
    prompts = ["".join(digits.choices("0123456789", k=PROMPT_LEN - 1)) + ">" for _ in range(512)]
    prompt_file = directory / "prompts.jsonl"
    prompt_file.write_text("".join(json.dumps({"prompt": prompt, "label": ""}) + "\n" for prompt in prompts))
    return files.hf_checkpoint, prompt_file


class StepTimes:
    """Ends of steps, in wall-clock and CPU seconds; a step reaches from one end to the next."""

    def __init__(self) -> None:
        self._ends: list[tuple[float, float]] = []

    def end(self) -> None:
        self._ends.append((time.perf_counter(), time.process_time()))

    def outcome(self) -> dict[str, float]:
        counted = self._ends[UNCOUNTED_STEPS - 1 :]
        steps = len(counted) - 1
        wall, cpu = (counted[-1][i] - counted[0][i] for i in (0, 1))
        responses = GROUPS * GROUP_SIZE * steps
        return {"samples_per_second": responses / wall, "samples_per_cpu_second": responses / cpu}


def run_ours(args: argparse.Namespace) -> dict[str, Any]:
    from observability import Progress
    from train.config import cli
    from train.inline import InlineRuntime
    from train.loop import StopRequest, run_loop
    from train.prepare import prepare

    times = StepTimes()
    parts: list[dict[str, float]] = []

    class Watch:
        """The loop's tracker."""

        def log(self, _step: int, metrics: dict[str, float]) -> None:
            times.end()
            parts.append(metrics)

        def close(self) -> None: ...

    with tempfile.TemporaryDirectory() as name:
        model, prompts = write_inputs(Path(name))
        flags = {
            "accelerator": "cpu",
            "launcher": "inline",
            "hf-checkpoint": model,
            "prompt-data": prompts,
            "label-key": "label",
            "custom-rm-path": f"{MODULE}.reward",
            "rollout-batch-size": GROUPS,
            "n-samples-per-prompt": GROUP_SIZE,
            "num-steps-per-rollout": OPTIMIZER_STEPS,
            "rollout-max-response-len": args.new_tokens,
            "rollout-min-response-len": args.new_tokens,
            "num-rollout": UNCOUNTED_STEPS + args.steps,
            "lr": 1e-4,
            "eps-clip-high": 0.28,
            "rollout-threads": args.threads,
            "trainer-threads": args.threads,
            "output-dir": Path(name) / "run",
        }
        prepared = prepare(cli.parse([text for flag, value in flags.items() for text in (f"--{flag}", str(value))]))
        progress = Progress("off", prepared.config.job.num_rollout)
        runtime = InlineRuntime(prepared.config, prepared.accelerator, progress, prepared.run_dir)
        try:
            runtime.start()
            run_loop(
                runtime,
                num_rollout=prepared.config.job.num_rollout,
                tracker=Watch(),
                progress=progress,
                stop=StopRequest(),
            )
        finally:
            runtime.close()
    check_tokens(sum(part["rollout/response_tokens"] for part in parts), len(parts), args)
    counted = parts[UNCOUNTED_STEPS:]
    keys = ("perf/rollout_time", "perf/train_time", "perf/update_weights_time", "perf/step_time")
    seconds = {key: sum(part[key] for part in counted) / len(counted) for key in keys}
    return times.outcome() | {"parts": seconds}


def run_trl(args: argparse.Namespace) -> dict[str, Any]:
    import torch
    from transformers import TrainerCallback

    from benchmarks.trl_grpo import GrpoSettings, make_trainer

    torch.set_num_threads(args.threads)
    times = StepTimes()

    class Watch(TrainerCallback):
        def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            if state.global_step % OPTIMIZER_STEPS == 0:
                times.end()

    settings = GrpoSettings(
        prompts=GROUPS,
        group_size=GROUP_SIZE,
        optimizer_steps=OPTIMIZER_STEPS,
        max_new_tokens=args.new_tokens,
        min_new_tokens=args.new_tokens,
        num_rollout=UNCOUNTED_STEPS + args.steps,
        seed=0,
        lr=1e-4,
    )
    with tempfile.TemporaryDirectory() as name:
        model, prompts = write_inputs(Path(name))
        score = lambda responses, _labels: [score_response(response) for response in responses]
        trainer = make_trainer(model, prompts, settings, score, Watch(), Path(name) / "out")
        trainer.train()
        check_tokens(
            trainer.state.num_input_tokens_seen - PROMPT_LEN * settings.responses * settings.num_rollout,
            settings.num_rollout,
            args,
        )
    return times.outcome()


def check_tokens(seen: float, rollouts: int, args: argparse.Namespace) -> None:
    """Both sides must have generated what they were compared on."""
    expected = GROUPS * GROUP_SIZE * args.new_tokens * rollouts
    if seen != expected:
        raise RuntimeError(f"{seen:.0f} tokens were generated, {expected} are compared")


def side_flags(side: str, args: argparse.Namespace) -> list[str]:
    given = {"side": side, "steps": args.steps, "new-tokens": args.new_tokens, "threads": args.threads}
    return [text for flag, value in given.items() for text in (f"--{flag}", str(value))]


def main(argv: list[str] | None = None) -> None:
    flags = parser(__doc__, repeats=5)
    flags.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    flags.add_argument("--steps", type=int, default=6, help="counted steps of each run")
    flags.add_argument("--new-tokens", type=int, default=32, help="tokens of every response")
    flags.add_argument("--threads", type=int, default=1, help="threads of each side")
    args = flags.parse_args(argv)
    if args.side is not None:
        hand_back(run_ours(args) if args.side == "accelrl" else run_trl(args))
        return
    runs = alternate(
        {
            side: lambda _, side=side: in_process(MODULE, *side_flags(side, args), threads=args.threads)
            for side in SIDES
        },
        args.repeats,
    )
    rows = []
    faster: dict[str, Spread] = {}
    for key, label in (("samples_per_second", "samples/s"), ("samples_per_cpu_second", "samples/CPU s")):
        ours, theirs = ([run[key] for run in runs[side]] for side in SIDES)
        faster[key] = ratios(ours, theirs)
        rows.append([label, Spread.of(ours).text(1), Spread.of(theirs).text(1), faster[key].text()])
    title = (
        f"One GRPO step: {GROUPS} x {GROUP_SIZE} responses of {args.new_tokens} tokens to prompts of {PROMPT_LEN}, "
        f"{OPTIMIZER_STEPS} optimizer steps, {args.threads} thread(s); median (min to max)"
    )
    report("rl_step", {"runs": runs, "times_faster": faster}, table(title, ["", *SIDES, "ratio"], rows), args.json)


if __name__ == "__main__":
    main()
