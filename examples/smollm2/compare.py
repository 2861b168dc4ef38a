"""What an evaluation's mean hides: greedy answers of two models to the same sums, by transformers alone, in float32."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path, help="model directory")
    parser.add_argument("after", type=Path, help="model directory")
    parser.add_argument("--prompts", type=Path, default=Path("runs/smollm2/eval_prompts.jsonl"))
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    entries = [json.loads(line) for line in args.prompts.read_text(encoding="utf-8").splitlines()]
    scores = {
        name: report(name, directory, entries) for name, directory in (("before", args.before), ("after", args.after))
    }
    difference = torch.tensor(scores["after"], dtype=torch.float64) - torch.tensor(
        scores["before"], dtype=torch.float64
    )
    error = difference.std() / len(entries) ** 0.5
    better, worse = int((difference > 0).sum()), int((difference < 0).sum())
    print(f"difference {difference.mean():.3f}, standard error {error:.3f}; better {better}, worse {worse}")


def report(name: str, directory: Path, rows: list[dict[str, Any]]) -> list[float]:
    """Print how well the model did, with and without a 0 in the sum; the reward of each row."""
    import reasoning_gym

    task = reasoning_gym.create_dataset("chain_sum", size=1, seed=0)
    entries = [row["metadata"]["entry"] for row in rows]
    numbers = [entry["metadata"]["expression"].split()[::2] for entry in entries]
    given = answers(directory, [row["prompt"] for row in rows])
    scores = [float(task.score_answer(answer, entry)) for answer, entry in zip(given, entries, strict=True)]
    parts = {True: [], False: []}
    for score, pair in zip(scores, numbers, strict=True):
        parts["0" in pair].append(score)
    copies = sum(answer in pair for answer, pair in zip(given, numbers, strict=True))
    shown = ", ".join(
        f"{sum(part) / len(part):.2f} on {len(part)} {'with' if zero else 'without'} a 0"
        for zero, part in parts.items()
    )
    print(f"{name:6} {sum(scores) / len(scores):.3f}: {shown}; {copies} of {len(given)} answers repeat a number")
    return scores


def answers(directory: Path, prompts: list[Any]) -> list[str]:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="float32")
    batch = tokenizer.apply_chat_template(
        prompts, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**batch, max_new_tokens=8, do_sample=False)
    return [
        text.strip()
        for text in tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    ]


if __name__ == "__main__":
    main()
