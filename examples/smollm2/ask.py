"""Ask a model directory that a run exported, with nothing but transformers."""

from __future__ import annotations

import argparse
import os

from prepare import INTRODUCTION


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="what --save-hf wrote")
    parser.add_argument(
        "questions",
        nargs="*",
        default=["What is the capital of France?", "8 - 0 ="],
        help="what ends in = is asked as in training, after two sums with their answers",
    )
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    for question in args.questions:
        introduction = INTRODUCTION if question.endswith("=") else []
        messages = [*introduction, {"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
        output = model.generate(**prompt, max_new_tokens=16, do_sample=False)
        answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        print(question, answer.strip())


if __name__ == "__main__":
    main()
