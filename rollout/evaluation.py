"""Evaluation: every prompt of the held-out sets answered and scored, beside training and without touching it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

from observability.rollout_metrics import leaves_of
from rollout.config import INHERIT, EvalConfig, RolloutConfig
from rollout.engines.protocol import SamplingParams
from rollout.group import GroupRunner, run_all
from rollout.limits import evaluation_flags
from samples import DataSource
from samples.config import DataConfig
from samples.sample import Group, Status


@dataclass(frozen=True)
class EvaluationSet:
    """One set of prompts under the name that its metrics bear."""

    name: str
    source: DataSource


def load_evaluation_sets(
    config: EvalConfig, data: DataConfig, tokenizer: Any, *, max_prompt_len: int
) -> list[EvaluationSet]:
    """The sets of ``--eval-prompt-data``, each file checked from end to end. Raises InputError for a bad one.

    ``data`` are training's settings of prompts, which hold where ``config`` has none of its own.
    """
    flags = evaluation_flags(config)
    sets = []
    for name, spec in config.datasets:
        own = {
            "prompt_data": (spec,),
            "input_key": data.input_key if config.eval_input_key == INHERIT else config.eval_input_key,
            "label_key": data.label_key if config.eval_label_key == INHERIT else config.eval_label_key,
            "rollout_shuffle": False,
        }
        source = DataSource(
            data.model_copy(update=own),
            tokenizer,
            seed=0,  # nothing is drawn by chance: each evaluation takes every prompt, in file order
            n_samples_per_prompt=config.n_samples_per_eval_prompt,
            max_prompt_len=max_prompt_len,
            flags=flags,
        )
        sets.append(EvaluationSet(name, source))
    return sets


def evaluation_params(config: EvalConfig, rollout: RolloutConfig) -> SamplingParams:
    """How evaluations sample; what ends a response is the rollout's."""
    return SamplingParams(
        max_new_tokens=config.eval_max_response_len or rollout.rollout_max_response_len,
        min_new_tokens=rollout.rollout_min_response_len,
        temperature=config.eval_temperature,
        top_p=config.eval_top_p,
        top_k=config.eval_top_k,
        stop=rollout.rollout_stop,
        stop_token_ids=rollout.rollout_stop_token_ids,
    )


class Evaluator:
    """Answers every prompt of every set with the engine's current weights.

    Set number ``i`` draws its random numbers as rollout ``-1 - i``, which no rollout of training is, and numbers its
    samples from 0 each time: an outcome depends on seed and weights alone, so two evaluations of the same weights agree
    and a difference between two steps is due to the weights. The prompts of training stay where they were.
    """

    def __init__(
        self,
        config: EvalConfig,
        rollout: RolloutConfig,
        *,
        runner: GroupRunner,
        sets: Sequence[EvaluationSet],
        reward_key: str | None,
    ) -> None:
        self._runner = runner
        self._sets = sets
        self._params = evaluation_params(config, rollout)
        self._reward_key = reward_key
        self._pass_threshold = config.eval_pass_threshold

    async def evaluate(self, rollout_id: int) -> dict[str, float]:
        """Metrics of every set. ``rollout_id``, which hooks and rewards see, is that of the step before."""
        metrics: dict[str, float] = {}
        for number, one in enumerate(self._sets):
            groups = one.source.every_group()
            prompts = len(groups)
            await run_all([self._answer(group, rollout_id, -1 - number) for group in groups])
            metrics |= evaluation_metrics(
                one.name, groups, reward_key=self._reward_key, pass_threshold=self._pass_threshold
            )
            metrics[f"eval/{one.name}/num_prompts"] = float(prompts)
            metrics[f"eval/{one.name}/bad_rows"] = float(one.source.prompts.bad_rows.count)
            metrics[f"eval/{one.name}/skipped_prompts"] = float(len(one.source.prompts) - prompts)
        return metrics

    async def _answer(self, group: Group, rollout_id: int, stream: int) -> None:
        await self._runner.run(group, self._params, rollout_id=rollout_id, evaluation=True, stream=stream)


def evaluation_metrics(
    name: str, groups: Sequence[Group], *, reward_key: str | None = None, pass_threshold: float | None = None
) -> dict[str, float]:
    """``eval/<name>`` (mean reward) and what goes with it; a mean over nothing is left out.

    pass@k, for k = 1, 2, 4, ... up to the responses that every prompt has, needs to know what passes: a reward of at
    least ``pass_threshold``, or, without one, a reward of 1 where every reward is 0 or 1.
    """
    samples = list(leaves_of(groups))
    if not samples:
        return {}
    prefix = f"eval/{name}"
    metrics = {
        f"{prefix}/num_samples": float(len(samples)),
        f"{prefix}/response_len/mean": sum(sample.response_length for sample in samples) / len(samples),
        f"{prefix}/truncated_ratio": sum(sample.status is Status.TRUNCATED for sample in samples) / len(samples),
    }
    scored = [rewards for group in groups if (rewards := _rewards(group, reward_key))]
    flat = [reward for rewards in scored for reward in rewards]
    if not flat:
        return metrics
    metrics[prefix] = sum(flat) / len(flat)
    threshold = pass_threshold if pass_threshold is not None else 1.0 if set(flat) <= {0.0, 1.0} else None
    if threshold is not None:
        passes = [(len(rewards), sum(reward >= threshold for reward in rewards)) for rewards in scored]
        k = 1
        while k <= min(n for n, _ in passes):
            metrics[f"{prefix}/pass@{k}"] = sum(pass_at_k(n, c, k) for n, c in passes) / len(passes)
            k *= 2
    return metrics


def pass_at_k(n: int, c: int, k: int) -> float:
    """Estimate, without bias, of the chance that one of ``k`` responses passes, when ``c`` of ``n`` >= k did.

    1 - C(n - c, k) / C(n, k), Chen et al. 2021, "Evaluating Large Language Models Trained on Code" (arXiv 2107.03374).
    """
    return 1.0 - comb(n - c, k) / comb(n, k)


def _rewards(group: Group, reward_key: str | None) -> list[float]:
    """A reward for each response: of one that fanned out, the mean over its samples."""
    means = []
    for member in group:
        rewards = [sample.reward_value(reward_key) for sample in leaves_of([member]) if sample.reward is not None]
        means += [sum(rewards) / len(rewards)] if rewards else []
    return means
