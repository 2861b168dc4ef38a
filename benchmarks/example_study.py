"""Which settings let the built-in example learn on every seed, which do not, and why.

Run ``python -m benchmarks.example_study``. Every run is the product's own command, ``accelrl train --launcher inline``,
in a process of its own; a setting is a handful of its flags. A run passes when the mean of ``rollout/raw_reward`` over
its last ten rollouts is at least 0.9.

Why runs fail, as the columns show it: the policy grows sure of a wrong digit. All answers to a prompt are then alike,
the group has no spread in its rewards and takes no gradient, so nothing undoes the mistake: the entropy and the share
of groups with a spread go to zero while the reward stands still below the goal ("stuck digits" are answered wrongly
and without doubt). It takes steps that are too large for what they were estimated from: few responses a rollout, a
high learning rate, or, late in a run, four optimizer steps on the two or three groups that still have a spread, where
optimizer steps of a fixed number of samples (``--global-batch-size``) make it one.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT, parser, report, table, thread_env
from benchmarks.study_hook import FILE_VARIABLE

GOAL, LAST, WINDOW = 0.9, 10, 5
SURE, WRONG = 0.1, 0.5  # nats a token below which the policy is sure, and the share of right answers of a lost digit
RARE = 0.01  # share of the samples: the largest of three digits is 0 once in a thousand prompts
SEEDS = range(6)

# A setting's flags, over those of train/example.py.
SETTINGS: dict[str, list[str]] = {
    "default": [],
    "16 prompts x 8 samples": [
        "--rollout-batch-size",
        "16",
        "--n-samples-per-prompt",
        "8",
        "--global-batch-size",
        "32",
    ],
    "no entropy bonus": ["--entropy-coef", "0"],
    "one sampling round": ["--max-sampling-rounds", "1"],
    "constant learning rate": ["--lr-decay-style", "constant"],
    "learning rate 2e-3": ["--lr", "2e-3"],
    "learning rate 3e-3": ["--lr", "3e-3"],
    "always 4 optimizer steps": ["--num-steps-per-rollout", "4"],
    "1 optimizer step": ["--global-batch-size", "512"],
    "no filter, one round": ["--dynamic-sampling-filter-path", "none"],
}


def run(setting: str, seed: int, directory: Path) -> dict[str, Any]:
    """One run of the command. Raises RuntimeError with the end of its output when it fails."""
    run_dir = directory / f"{setting.replace(' ', '-')}-{seed}"
    notes = directory / f"{run_dir.name}.jsonl"
    command = [str(Path(sys.executable).with_name("accelrl")), "train", "--accelerator", "cpu", "--launcher", "inline"]
    command += ["--seed", str(seed), "--output-dir", str(run_dir), "--progress", "off"]
    command += ["--user-code-dir", str(ROOT), "--rollout-sample-hook-path", "benchmarks.study_hook.note"]
    output = directory / f"{run_dir.name}.log"
    with output.open("w") as log:
        process = subprocess.Popen(
            command + SETTINGS[setting],
            env=os.environ | thread_env(1) | {FILE_VARIABLE: str(notes)},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        tail = "\n".join(output.read_text().splitlines()[-20:])
        raise RuntimeError(f"{setting!r}, seed {seed}, ended with status {process.returncode}:\n{tail}")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    digits = [json.loads(line)["digits"] for line in notes.read_text().splitlines()]
    print(f"  {setting}, seed {seed}: {_mean_reward(rows):.3f}", file=sys.stderr, flush=True)
    return {"seed": seed, "cpu_seconds": usage.ru_utime + usage.ru_stime} | examine(rows, digits)


def examine(rows: list[dict[str, float]], digits: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """What became of a run: its metrics and, per rollout, each digit's sums (``study_hook``)."""
    rewards = [row["rollout/raw_reward"] for row in rows]
    reached = [end for end in range(WINDOW, len(rewards) + 1) if sum(rewards[end - WINDOW : end]) / WINDOW >= GOAL]
    quarters = [max(1, len(rows) * quarter // 4) for quarter in (1, 2, 3, 4)]
    return {
        "reward": _mean_reward(rows),
        "rollouts_to_goal": reached[0] if reached else None,
        "entropy": [_entropy(digits[end - WINDOW : end]) for end in quarters],
        "zero_spread": [
            statistics.fmean(row["rollout/zero_spread_ratio"] for row in rows[max(0, end - WINDOW) : end])
            for end in quarters
        ],
        "stuck_digits": _stuck(digits[-LAST:]),
    }


def _mean_reward(rows: list[dict[str, float]]) -> float:
    return statistics.fmean(row["rollout/raw_reward"] for row in rows[-LAST:])


def _entropy(rollouts: list[dict[str, dict[str, float]]]) -> float:
    """Of the policy over all sampled tokens, in nats a token: the mean of -log p."""
    sums = [digit for rollout in rollouts for digit in rollout.values()]
    return sum(digit["surprise"] for digit in sums) / sum(digit["tokens"] for digit in sums)


def _stuck(rollouts: list[dict[str, dict[str, float]]]) -> list[str]:
    """Digits that are answered wrongly more often than not, and with hardly any doubt; rare ones do not count."""
    stuck = []
    everything = sum(digit["samples"] for rollout in rollouts for digit in rollout.values())
    for name in "0123456789":
        sums = [rollout[name] for rollout in rollouts if name in rollout]
        samples, right, tokens, surprise = (
            sum(digit[key] for digit in sums) for key in ("samples", "right", "tokens", "surprise")
        )
        if samples > RARE * everything and right / samples < WRONG and surprise / tokens < SURE:
            stuck.append(name)
    return stuck


def row_of(setting: str, runs: list[dict[str, Any]]) -> list[str]:
    """A setting's line in the table."""
    rewards = [run["reward"] for run in runs]
    passed = sum(reward >= GOAL for reward in rewards)
    reached = [run["rollouts_to_goal"] for run in runs if run["rollouts_to_goal"] is not None]
    half, end = (
        [statistics.median(run[key][at] for run in runs) for key in ("entropy", "zero_spread")] for at in (1, 3)
    )
    return [
        setting,
        f"{passed} of {len(runs)}",
        f"{min(rewards):.3f}",
        f"{statistics.median(rewards):.3f}",
        f"{statistics.median(reached):.0f}" if reached else "-",
        f"{statistics.median(run['cpu_seconds'] for run in runs):.0f}",
        f"{half[0]:.2f}, {half[1]:.0%}",
        f"{end[0]:.2f}, {end[1]:.0%}",
        " ".join(f"{run['seed']}:{''.join(run['stuck_digits'])}" for run in runs if run["stuck_digits"]) or "none",
    ]


HEADER = (
    "setting",
    f"seeds at {GOAL}",
    "least",
    "median",
    f"rollouts to {GOAL}",
    "CPU s",
    "entropy, zero spread: half-way",
    "at the end",
    "stuck digits (seed:digits)",
)


def main(argv: list[str] | None = None) -> None:
    flags = parser(__doc__, repeats=1)
    flags.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    flags.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="NAME")
    flags.add_argument("--jobs", type=int, default=2, help="runs at a time")
    args = flags.parse_args(argv)
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(args.jobs) as pool:
        futures = {
            setting: [pool.submit(run, setting, seed, Path(name)) for seed in args.seeds] for setting in args.settings
        }
        results = {}
        for setting, runs in futures.items():
            results[setting] = [future.result() for future in runs]
            print(f"  {', '.join(row_of(setting, results[setting]))}", file=sys.stderr, flush=True)
    rows = [row_of(setting, runs) for setting, runs in results.items()]
    title = f"The built-in example: mean reward of the last {LAST} rollouts, over seeds {args.seeds}"
    report("example_study", {"settings": SETTINGS, "runs": results}, table(title, HEADER, rows), args.json)


if __name__ == "__main__":
    main()
