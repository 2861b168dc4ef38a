"""``python -m rollout generate``: answer prompts with a model and score them, without any training."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import IO

from rollout.config import RewardConfig, RolloutConfig
from samples.config import DataConfig
from samples.errors import InputError
from samples.sample import Group


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``generate``; their names and meanings are those of ``python -m train``."""
    data, rollout, reward = DataConfig.model_fields, RolloutConfig.model_fields, RewardConfig.model_fields
    parser.add_argument("--hf-checkpoint", required=True, type=Path, help="Hugging Face model directory")
    parser.add_argument("--prompt-data", required=True, nargs="+", help=data["prompt_data"].description)
    parser.add_argument("--input-key", default=data["input_key"].default, help=data["input_key"].description)
    parser.add_argument("--label-key", default=data["label_key"].default, help=data["label_key"].description)
    parser.add_argument("--metadata-key", default=data["metadata_key"].default, help=data["metadata_key"].description)
    parser.add_argument("--apply-chat-template", action="store_true", help=data["apply_chat_template"].description)
    parser.add_argument("--num-prompts", type=int, default=16, help="prompts to answer, in file order (default: 16)")
    parser.add_argument("--n-samples-per-prompt", type=int, default=1, help="responses to each prompt (default: 1)")
    parser.add_argument("--rollout-max-response-len", type=int, default=256, help="longest response, in tokens")
    parser.add_argument("--rollout-temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--rollout-top-p", type=float, default=1.0, help=rollout["rollout_top_p"].description)
    parser.add_argument("--rollout-top-k", type=int, default=-1, help=rollout["rollout_top_k"].description)
    parser.add_argument("--rm-type", default=reward["rm_type"].default, help=reward["rm_type"].description)
    parser.add_argument("--rm-url", default=None, help=reward["rm_url"].description)
    parser.add_argument("--custom-rm-path", default=None, help=reward["custom_rm_path"].description)
    parser.add_argument("--reward-key", default=None, help=reward["reward_key"].description)
    parser.add_argument("--user-code-dir", default=None, help=reward["user_code_dir"].description)
    parser.add_argument(
        "--accelerator", default=None, help="cpu, cuda, musa, a registered vendor's name (default: auto)"
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run Python code that stands in the model directory"
    )
    parser.add_argument("--bf16", action="store_true", help="generate in bfloat16")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling")
    parser.add_argument(
        "--output", type=Path, default=None, help="write samples there as JSON lines (default: print them)"
    )


def generate(args: argparse.Namespace) -> int:
    """Answer and score; prints or writes the samples, then one line with the mean reward."""
    if args.num_prompts < 1 or args.n_samples_per_prompt < 1 or args.rollout_max_response_len < 1:
        raise InputError("--num-prompts, --n-samples-per-prompt and --rollout-max-response-len must be at least 1")
    if not args.rollout_temperature >= 0:
        raise InputError(f"--rollout-temperature {args.rollout_temperature}: must be 0 (greedy) or more")
    if not 0 < args.rollout_top_p <= 1:
        raise InputError(f"--rollout-top-p {args.rollout_top_p}: must be above 0 and at most 1")
    if args.rollout_top_k < 1 and args.rollout_top_k != -1:
        raise InputError(f"--rollout-top-k {args.rollout_top_k}: must be -1 (all) or at least 1")
    if args.output is not None:
        _check_writable(args.output)
    groups = asyncio.run(_generate(args))
    samples = [sample for group in groups for sample in group]
    if args.output is None:
        _print_samples(groups, sys.stdout)
    else:
        with args.output.open("w", encoding="utf-8") as file:
            for sample in samples:
                file.write(json.dumps(sample.to_dict(), ensure_ascii=False) + "\n")
    rewards = [sample.reward_value(args.reward_key) for sample in samples]
    print(f"{len(groups)} prompts, {len(samples)} responses, mean reward {sum(rewards) / len(rewards):.4f}")
    return 0


def _check_writable(output: Path) -> None:
    """Refuse, before any work is done, a file that could not be written after it; what it holds stays for now."""
    there = output.exists()
    try:
        output.open("a", encoding="utf-8").close()
    except OSError as error:
        raise InputError(f"--output {output}: cannot be written: {error.strerror}; choose another place") from error
    if not there:
        output.unlink()


async def _generate(args: argparse.Namespace) -> list[Group]:
    import torch

    from accel import select_accelerator
    from rollout.collectors.sync import UserArgs
    from rollout.engines.protocol import SamplingParams
    from rollout.engines.torch_engine import TorchEngine
    from rollout.generation import generate_sample
    from rollout.group import run_all
    from rollout.limits import context_limits
    from rollout.rewards import build_reward
    from samples import DataSource
    from samples.tokenizer import load_tokenizer

    rollout = RolloutConfig(rollout_max_response_len=args.rollout_max_response_len)
    reward_config = RewardConfig(
        rm_type=args.rm_type,
        rm_url=args.rm_url,
        custom_rm_path=args.custom_rm_path,
        reward_key=args.reward_key,
        user_code_dir=args.user_code_dir,
    )
    data = DataConfig(
        prompt_data=tuple(args.prompt_data),
        input_key=args.input_key,
        label_key=None if args.label_key == "none" else args.label_key,
        metadata_key=None if args.metadata_key == "none" else args.metadata_key,
        apply_chat_template=args.apply_chat_template,
        rollout_shuffle=False,
    )
    if not (args.hf_checkpoint / "config.json").is_file():
        raise InputError(
            f"--hf-checkpoint {args.hf_checkpoint}: no config.json there; give a Hugging Face model directory"
        )
    limits = context_limits(args.hf_checkpoint, rollout, data)
    source = DataSource(
        data,
        load_tokenizer(args.hf_checkpoint, trust_remote_code=args.trust_remote_code),
        seed=args.seed,
        n_samples_per_prompt=args.n_samples_per_prompt,
        max_prompt_len=limits.max_prompt_len,
    )
    groups = source.next_groups(args.num_prompts)
    reward = build_reward(reward_config, UserArgs(rollout, reward_config))
    engine = TorchEngine(
        args.hf_checkpoint,
        select_accelerator(args.accelerator),
        dtype=torch.bfloat16 if args.bf16 else torch.float32,
        max_running_requests=rollout.engine_max_running_requests,
        max_context_len=limits.max_context_len,
        trust_remote_code=args.trust_remote_code,
    )
    params = SamplingParams(
        max_new_tokens=args.rollout_max_response_len,
        temperature=args.rollout_temperature,
        top_p=args.rollout_top_p,
        top_k=args.rollout_top_k,
    )
    await engine.start()
    try:
        samples = [sample for group in groups for sample in group]
        for sample in samples:
            sample.rollout_id = 0
        await run_all(
            [
                generate_sample(engine, sample, params, seed=args.seed, max_context_len=limits.max_context_len)
                for sample in samples
            ]
        )
        await run_all([reward.score_group(group) for group in groups])
    finally:
        try:
            await reward.close()
        finally:
            await engine.stop()
    return groups


def _print_samples(groups: list[Group], out: IO[str]) -> None:
    for group in groups:
        for sample in group:
            out.write(f"{sample.prompt!r} -> {sample.response!r}  reward {sample.reward}\n")
