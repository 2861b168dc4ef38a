"""Contract tests of the functions that the rollout calls."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from filters import call_dynamic_filter
from hooks.apply import SampleHooks
from hooks.signature import bind_hook
from rollout.config import RewardConfig
from rollout.custom.contracts import FILTER, GENERATE, ROLLOUT
from rollout.custom.errors import CustomFunctionError
from rollout.custom.generate import CustomGenerate, Generated
from rollout.custom.rollout import RolloutContext, RolloutFunction
from rollout.engines.protocol import SamplingParams
from rollout.rewards import Reward
from rollout.rewards.custom import CustomReward
from rollout.rewards.custom_group import CustomGroupReward
from rollout.testing.engine import EchoEngine, EchoTokenizer, example_args, example_groups
from samples.config import DataConfig
from samples.custom_source import CustomDataSource
from samples.errors import InputError, RunError
from samples.sample import Group, Sample
from samples.signatures import bind_function

_PARAMS = SamplingParams(max_new_tokens=8)


def check_reward(function: Callable[..., Any], samples: Sequence[Sample] | None = None, **settings: Any) -> list[Any]:
    """``--custom-rm-path``: it scores each sample with a finite number (or a mapping, with ``reward_key=``).

    Returns the rewards. ``settings``: flags by field name that the function reads from ``args``.
    """
    given = list(samples) if samples is not None else _flat(example_groups())
    return _scored(_reward(CustomReward, function, settings), given)


def check_group_reward(function: Callable[..., Any], group: Group | None = None, **settings: Any) -> list[Any]:
    """The same with ``--group-rm``: one call for a group, a reward for each of its samples, in order."""
    given = group if group is not None else example_groups()[0]
    return _scored(_reward(CustomGroupReward, function, settings), given)


def check_sample_hook(function: Callable[..., Any], samples: Sequence[Sample] | None = None, **settings: Any) -> Group:
    """``--rollout-sample-hook-path``: it returns a Sample or None and leaves a sample that is still whole. Returns
    what the samples became."""
    given = list(samples) if samples is not None else _flat(example_groups())
    hooks = SampleHooks([_bound(lambda: bind_hook(_name(function), function))])
    context = {"rollout_id": 0, "evaluation": False, "group_index": 0, "weight_version": 0}
    after: Group = _run(hooks.apply(example_args(**settings), given, context))
    for sample in after:
        assert 0 <= sample.response_length <= len(sample.tokens), (
            f"{_name(function)} left sample {sample.index} with response_length {sample.response_length} and "
            f"{len(sample.tokens)} tokens"
        )
        for field in ("loss_mask", "rollout_log_probs", "rollout_kept_token_ids"):
            values = getattr(sample, field)
            assert values is None or len(values) == sample.response_length, (
                f"{_name(function)} left sample {sample.index} with {len(values)} entries in {field} and a response of "
                f"{sample.response_length} tokens"
            )
    return after


def check_filter(function: Callable[..., Any], groups: Sequence[Group] | None = None, **settings: Any) -> list[bool]:
    """``--dynamic-sampling-filter-path``: it says of each group whether to keep it, and of one whose responses fanned
    out; the groups stay as they were. Returns whether each was kept."""
    given = list(groups) if groups is not None else example_groups(scored=True)
    _bound(lambda: bind_function(_name(function), function, FILTER))
    kept: list[bool] = []
    fanned_out: Any = [[[sample] for sample in group] for group in given]
    for group in [*given, *fanned_out]:
        before = copy.deepcopy(group)
        kept.append(_run(_judged(function, example_args(**settings), group)))
        assert group == before, f"{_name(function)} changed the group that it judged"
    return kept[: len(given)]


def check_generate(function: Callable[..., Any], sample: Sample | None = None, **settings: Any) -> Generated:
    """``--custom-generate-function-path``: it finishes a sample, or fans it out into several. Returns those."""
    given = sample if sample is not None else example_groups(answered=False)[0][0]
    bound = _bound(lambda: bind_function(_name(function), function, GENERATE))
    generate = CustomGenerate(bound, example_args(**settings), EchoTokenizer())
    engine = EchoEngine()
    generated: Generated = _run(
        generate(engine, copy.deepcopy(given), _PARAMS, seed=0, max_context_len=4096, evaluation=False)
    )
    for member in generated if isinstance(generated, list) else [generated]:
        length = member.response_length
        for field in ("loss_mask", "rollout_log_probs"):
            values = getattr(member, field)
            assert values is None or len(values) == length, (
                f"{_name(function)} returned a sample with {len(values)} entries in {field} for {length} tokens; "
                "context.append(sample, ids) keeps them in step"
            )
        assert member.rollout_log_probs is not None or length == 0, f"{_name(function)} returned no rollout_log_probs"
    return generated


def check_rollout_function(function: Callable[..., Any], **settings: Any) -> list[Group]:
    """``--rollout-function-path``: two calls, each of which gives finished groups, none of them twice. Returns them."""
    source = _ExampleSource()
    bound = _bound(lambda: bind_function(_name(function), function, ROLLOUT))
    rollout = RolloutFunction(bound, example_args(**({"rollout_batch_size": 2} | settings)), source)

    async def generate(group: Group, params: SamplingParams | None = None) -> Group:
        from rollout.generation import generate_sample

        for sample in group:
            sample.rollout_id = 0
            await generate_sample(EchoEngine(), sample, params or _PARAMS, seed=0, max_context_len=4096)
        return group

    context = RolloutContext(generate, EchoTokenizer(), _PARAMS)
    groups: list[Group] = []
    for rollout_id in (0, 1):
        made, _, forgotten, _ = _run(rollout(rollout_id, context))
        assert not forgotten, (
            f"{_name(function)} drew {forgotten} groups in rollout {rollout_id} that it neither returned nor put back "
            "with data_source.add_samples; they would be answered anew"
        )
        groups += made
    return groups


def check_data_source(factory: Callable[..., Any], *, groups: int = 4, **settings: Any) -> list[Group]:
    """``--data-source-path``: it gives groups of samples, and one restored from its ``state_dict``, through JSON, goes
    on with the same prompts. Returns the first groups. ``settings``: what the class reads from ``args``."""
    name = _name(factory)

    def made() -> CustomDataSource:
        fields = {key: value for key, value in settings.items() if key in DataConfig.model_fields}
        config = DataConfig(**fields)
        return CustomDataSource(
            factory, config, EchoTokenizer(), path=name, seed=0, n_samples_per_prompt=2, max_prompt_len=4096
        )

    first, second = _bound(made), _bound(made)
    drawn: list[Group] = _run(_later(lambda: first.next_groups(groups)))
    assert drawn, f"{name}.get_samples gave no group"
    state = json.loads(json.dumps(_run(_later(first.state_dict))))
    second.load_state_dict(state)
    on, again = first.next_groups(groups), second.next_groups(groups)
    assert [[s.prompt for s in group] for group in on] == [[s.prompt for s in group] for group in again], (
        f"{name} restored from its state_dict() goes on with other prompts than the one it is of"
    )
    return drawn


class _ExampleSource:
    """Sums without end."""

    def __init__(self) -> None:
        self._groups = example_groups(64, answered=False)

    def next_groups(self, n: int) -> list[Group]:
        taken, self._groups = self._groups[:n], self._groups[n:]
        return taken

    def return_groups(self, groups: Sequence[Group], *, reset: bool = False) -> None:
        if reset:  # a contract test fails on groups that were forgotten; nobody draws them again
            return
        self._groups = [list(group) for group in groups] + self._groups


def _reward(kind: type[CustomReward], function: Callable[..., Any], settings: dict[str, Any]) -> CustomReward:
    config = RewardConfig()
    return _bound(
        lambda: kind(
            function,
            _name(function),
            example_args(**settings),
            timeout=config.rm_timeout,
            concurrency=config.rm_concurrency,
            reward_key=settings.get("reward_key"),
        )
    )


def _scored(reward: Reward, samples: Sequence[Sample]) -> list[Any]:
    async def score() -> list[Any]:
        try:
            return await reward.score_group(copy.deepcopy(list(samples)))
        finally:
            await reward.close()

    return list(_run(score()))


def _run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """What it gives; what a run would end on becomes an AssertionError with the same words."""
    try:
        return asyncio.run(coroutine)
    except (InputError, RunError, CustomFunctionError, TypeError) as error:
        raise AssertionError(str(error)) from error


async def _judged(function: Callable[..., Any], args: Any, group: Any) -> bool:
    return call_dynamic_filter(function, args, group).keep


async def _later(call: Callable[[], Any]) -> Any:
    return call()


def _bound(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except InputError as error:
        raise AssertionError(str(error)) from error


def _flat(groups: Sequence[Group]) -> Group:
    return [sample for group in groups for sample in group]


def _name(function: Any) -> str:
    owner = function if hasattr(function, "__qualname__") else type(function)  # a callable object has none of its own
    return f"{owner.__module__}.{owner.__qualname__}"
