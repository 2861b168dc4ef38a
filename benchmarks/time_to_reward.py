"""Seconds until the built-in example is learned, against TRL's GRPOTrainer on the same model, prompts and settings.

Run ``python -m benchmarks.time_to_reward``. The clock starts with the first rollout and stops when the mean reward of
five rollouts in a row has reached 0.9: ours at the end of that step, TRL's already when the rewards are known. Start-up
is not counted for either side. Every run is a process of its own, with one thread; the two sides take turns, seed by
seed. Ours runs in one process (``--launcher inline``), through the same loop, tracker and defaults as the command.

TRL's side (``benchmarks/trl_grpo.py`` says each setting) has the same 512 responses a rollout, four optimizer steps on
them, learning rate, warm-up, decay, clip range and entropy bonus, from ``EXAMPLE_SETTINGS``. What it lacks is dynamic
sampling: groups of equal rewards stay in its batch. Its decay is over twice as many rollouts, so that it may come later
than ours ends; a run that never comes counts with the time that it took, which is marked: the ratio is then a least.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import alternate, hand_back, in_process, parser, ratios, report, table

MODULE = "benchmarks.time_to_reward"
GOAL, WINDOW = 0.9, 5
SIDES = ("accelrl", "TRL")
LABELS = {"seconds": "wall clock", "cpu_seconds": "CPU time", "rollouts": "rollouts"}


class Clock:
    """Watches the mean rewards of a run; wall-clock and CPU seconds count from the first rollout's start."""

    def __init__(self) -> None:
        self.rewards: list[float] = []
        self._began: tuple[float, float] | None = None
        self._reached: tuple[float, float] | None = None

    def start(self) -> None:
        self._began = (time.perf_counter(), time.process_time())

    def add(self, mean_reward: float) -> None:
        assert self._began is not None
        self.rewards.append(mean_reward)
        last = self.rewards[-WINDOW:]
        if not self.reached and len(last) == WINDOW and sum(last) / WINDOW >= GOAL:
            self._reached = self._now()

    @property
    def reached(self) -> bool:
        return self._reached is not None

    def outcome(self) -> dict[str, Any]:
        """Seconds to the goal, or to the end of a run that did not get there."""
        seconds, cpu_seconds = self._reached or self._now()
        return {
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
            "rollouts": len(self.rewards),
            "reached": self.reached,
            "rewards": [round(reward, 3) for reward in self.rewards],
        }

    def _now(self) -> tuple[float, float]:
        assert self._began is not None
        return time.perf_counter() - self._began[0], time.process_time() - self._began[1]


def run_ours(seed: int) -> dict[str, Any]:
    from observability import Progress
    from train.config import cli
    from train.example import EXAMPLE_SETTINGS
    from train.inline import InlineRuntime
    from train.loop import StopRequest, run_loop
    from train.prepare import prepare

    clock, stop = Clock(), StopRequest()

    class Watch:
        """The loop's tracker; asks for a stop at the goal."""

        def log(self, _step: int, metrics: dict[str, float]) -> None:
            clock.add(metrics["rollout/raw_reward"])
            stop.requested = clock.reached

        def close(self) -> None: ...

    with tempfile.TemporaryDirectory() as directory:
        flags = ["--accelerator", "cpu", "--launcher", "inline", "--seed", str(seed), "--output-dir", directory]
        prepared = prepare(cli.parse(flags, EXAMPLE_SETTINGS))
        progress = Progress("off", prepared.config.job.num_rollout)
        runtime = InlineRuntime(prepared.config, prepared.accelerator, progress, prepared.run_dir)
        try:
            runtime.start()
            clock.start()
            run_loop(
                runtime, num_rollout=prepared.config.job.num_rollout, tracker=Watch(), progress=progress, stop=stop
            )
        finally:
            runtime.close()
    return clock.outcome()


def run_trl(seed: int) -> dict[str, Any]:
    import torch
    from transformers import TrainerCallback

    from benchmarks.trl_grpo import GrpoSettings, make_trainer
    from train.example import EXAMPLE_SETTINGS as OURS
    from train.example import write_example

    torch.set_num_threads(1)
    clock = Clock()

    def score(responses: list[str], labels: list[str]) -> list[float]:
        rewards = [float(r.strip() == label) for r, label in zip(responses, labels, strict=True)]
        clock.add(sum(rewards) / len(rewards))
        return rewards

    class Watch(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            clock.start()

        def on_step_end(self, _args: Any, _state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = clock.reached

    settings = GrpoSettings(
        prompts=OURS["rollout_batch_size"],
        group_size=OURS["n_samples_per_prompt"],
        optimizer_steps=OURS["rollout_batch_size"] * OURS["n_samples_per_prompt"] // OURS["global_batch_size"],
        max_new_tokens=OURS["rollout_max_response_len"],
        min_new_tokens=0,
        num_rollout=2 * OURS["num_rollout"],
        seed=seed,
        lr=OURS["lr"],
        lr_warmup_iters=OURS["lr_warmup_iters"],
        lr_decay_style=OURS["lr_decay_style"],
        eps_clip=OURS["eps_clip"],
        eps_clip_high=OURS["eps_clip_high"],
        entropy_coef=OURS["entropy_coef"],
    )
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        files = write_example(directory / "example", seed)
        trainer = make_trainer(files.hf_checkpoint, files.prompt_data, settings, score, Watch(), directory / "out")
        trainer.train()
    return clock.outcome()


def compare(seeds: list[int]) -> dict[str, list[dict[str, Any]]]:
    """Each side's outcome on every seed."""
    return alternate(
        {side: lambda i, side=side: in_process(MODULE, "--side", side, "--seed", str(seeds[i])) for side in SIDES},
        len(seeds),
    )


def _text(run: dict[str, Any]) -> str:
    never = "" if run["reached"] else "never: "
    return f"{never}{run['seconds']:.1f} s / {run['cpu_seconds']:.1f} s / {run['rollouts']}"


def main(argv: list[str] | None = None) -> None:
    flags = parser(__doc__, repeats=3)
    flags.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    flags.add_argument("--seed", type=int, default=0, help="the first seed; one more for every repeat")
    args = flags.parse_args(argv)
    if args.side is not None:
        hand_back(run_ours(args.seed) if args.side == "accelrl" else run_trl(args.seed))
        return
    seeds = [args.seed + i for i in range(args.repeats)]
    runs = compare(seeds)
    ours, theirs = runs["accelrl"], runs["TRL"]
    sooner = {key: ratios([run[key] for run in theirs], [run[key] for run in ours]) for key in LABELS}
    rows = [
        [
            seed,
            *map(_text, (mine, other)),
            f"{other['seconds'] / mine['seconds']:.2f}",
        ]
        for seed, mine, other in zip(seeds, ours, theirs, strict=True)
    ]
    rows += [[f"all, {label}", "", "", sooner[key].text()] for key, label in LABELS.items()]
    title = f"Time to a {WINDOW}-rollout mean reward of {GOAL} (wall clock / CPU time / rollouts); ratio: TRL's / ours"
    report(
        "time_to_reward",
        {"runs": runs, "seeds": seeds, "times_sooner": sooner, "goal": GOAL, "window": WINDOW},
        table(title, ["seed", *SIDES, "times sooner"], rows),
        args.json,
    )


if __name__ == "__main__":
    main()
