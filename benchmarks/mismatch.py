"""How far the log-probabilities of rollout engine and trainer are apart, by engine and precision.

Run ``python -m benchmarks.mismatch`` (after ``make sglang-cpu``; ``--engines torch`` without). The built-in example is
trained for some steps each way with ``--use-tis``; the figures are those of ``metrics.jsonl``
(``train/train_rollout_logprob_abs_diff``, ``train/tis_...``), means over steps but for the largest difference. They
follow from arithmetic, not from time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean

from benchmarks.harness import parser, report, table, thread_env

DIFFERENCE = "train/train_rollout_logprob_abs_diff"
COLUMNS = (DIFFERENCE, f"{DIFFERENCE}_max", "train/tis_ratio_mean", "train/tis_clip_fraction")


def steps_of(engine: str, precision: str, steps: int) -> list[dict[str, float]]:
    """Metrics of a short run of the example, a step each."""
    with tempfile.TemporaryDirectory() as name:
        run_dir = Path(name) / "run"
        command = [sys.executable, "-m", "train", "--accelerator", "cpu", "--launcher", "inline", "--progress", "off"]
        command += ["--rollout-engine", engine, "--num-rollout", str(steps), "--output-dir", str(run_dir), "--use-tis"]
        command += ["--rollout-batch-size", "16", "--lr-warmup-iters", "0", "--skip-eval-before-train"]
        command += ["--bf16"] if precision == "bf16" else []
        environment = os.environ | thread_env(1)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stderr[-3000:]}")
        return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def main(argv: list[str] | None = None) -> None:
    flags = parser(__doc__, repeats=1)
    flags.add_argument("--engines", nargs="+", choices=("torch", "sglang"), default=["torch", "sglang"])
    flags.add_argument("--precisions", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    flags.add_argument("--steps", type=int, default=5, help="training steps of each run (default: 5)")
    args = flags.parse_args(argv)
    rows, results = [], {}
    for engine in args.engines:
        for precision in args.precisions:
            steps = steps_of(engine, precision, args.steps)
            largest = max(step[COLUMNS[1]] for step in steps)
            means = {key: fmean(step[key] for step in steps) for key in COLUMNS} | {COLUMNS[1]: largest}
            results[f"{engine} {precision}"] = means
            rows.append([f"{engine}, {precision}", *(f"{means[key]:.2e}" for key in COLUMNS[:2])])
            rows[-1] += [f"{means[key]:.4f}" for key in COLUMNS[2:]]
    title = f"Rollout and trainer on the built-in example, {args.steps} steps"
    header = ["engine, precision", "mean |difference|", "largest", "mean weight before bounds", "share bounded"]
    report("mismatch", {"runs": results}, table(title, header, rows), args.json)


if __name__ == "__main__":
    main()
