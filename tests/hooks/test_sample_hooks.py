"""The contract of sample hooks. They are given by path, as a user gives them: this module's functions are hooks."""

import asyncio
import functools
import logging
import types

import pytest

from hooks import (
    SampleHookError,
    apply_rollout_sample_hooks,
    current_rollout_id,
    load_sample_hooks,
    set_current_rollout_id,
)
from hooks.apply import ERROR_KEY
from hooks.signature import bind_hook
from rollout.config import RolloutConfig
from samples import InputError, Sample, Status


def configured(*names: str, **settings) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        rollout_sample_hook_path=tuple(f"{__name__}.{name}" for name in names),
        rollout_sample_hook_on_error=settings.pop("on_error", "raise"),
        **settings,
    )


def run(args, value, **context):
    return asyncio.run(apply_rollout_sample_hooks(args, value, **context))


def note(sample: Sample, what) -> None:
    sample.metadata.setdefault("seen", []).append(what)


def first(args, sample):
    note(sample, "first")


async def second(args, sample):
    await asyncio.sleep(0)
    note(sample, "second")
    return sample


def replaces(args, sample):
    return Sample(index=sample.index, response="new")


def fails(args, sample):
    if sample.index != 1:
        raise LookupError("no such page")


async def fails_later(args, sample):
    await asyncio.sleep(0)
    raise LookupError("no such page")


def returns_mapping(args, sample):
    return {"sample": sample}


async def returns_text(args, sample):
    return "done"


def returns_generator(args, sample):
    yield sample


# Shapes, order, no-op


@pytest.mark.parametrize(
    "value",
    [Sample(index=0), [], [Sample(index=0)], [[Sample(index=0)], [], [Sample(index=1), [Sample(index=2)]]]],
    ids=["sample", "empty", "group", "nested"],
)
def test_nested_shapes_are_kept_and_every_leaf_is_seen(value):
    result = run(configured("replaces"), value)

    def shape(node):
        return [shape(item) for item in node] if isinstance(node, list) else node.index

    def leaves(node):
        return [leaf for item in node for leaf in leaves(item)] if isinstance(node, list) else [node]

    assert result is not value
    assert shape(result) == shape(value)
    assert all(sample.response == "new" for sample in leaves(result))


def test_hooks_run_in_the_order_given_sync_and_async():
    assert run(configured("second", "first", "second"), Sample()).metadata["seen"] == ["second", "first", "second"]


def test_a_replaced_sample_is_what_the_next_hook_sees():
    result = run(configured("first", "replaces", "second"), Sample(index=3))
    assert (result.index, result.response, result.metadata["seen"]) == (3, "new", ["second"])


@pytest.mark.parametrize("paths", [(), [], None])
def test_with_no_hook_the_value_itself_comes_back(paths):
    args = types.SimpleNamespace(rollout_sample_hook_path=paths)
    value = [[Sample()], "anything at all"]
    assert run(args, value) is value
    assert load_sample_hooks(args) is None


def test_the_configuration_object_of_a_run_is_accepted():
    config = RolloutConfig(rollout_sample_hook_path=(f"{__name__}.first",))
    assert run(config, Sample()).metadata["seen"] == ["first"]


def test_a_namespace_with_a_single_path_and_no_error_policy_is_accepted():
    args = types.SimpleNamespace(rollout_sample_hook_path=f"{__name__}.first")
    assert run(args, Sample()).metadata["seen"] == ["first"]


def test_something_that_is_no_sample_is_refused():
    with pytest.raises(TypeError, match="not to None"):
        run(configured("first"), [Sample(), None])


# Arguments by signature


def wants_nothing(args, sample):
    note(sample, args.marker)


def wants_some(args, sample, *, rollout_id, evaluation=None):
    note(sample, (rollout_id, evaluation))


def wants_all(args, sample, **kwargs):
    note(sample, kwargs)


def wants_mixed(args, sample, group_index, *rest, weight_version, **kwargs):
    note(sample, (group_index, rest, weight_version, sorted(kwargs)))


def wants_by_position(args, sample, rollout_id, evaluation, other=5, /, **kwargs):
    note(sample, (rollout_id, evaluation, other, sorted(kwargs)))


def wants_rest(*everything):
    note(everything[1], len(everything))


def with_unknown_default(args, sample, *, colour="red"):
    note(sample, colour)


class Callable:
    async def __call__(self, args, sample, *, evaluation):
        note(sample, ("object", evaluation))

    def method(self, args, sample, *, rollout_id):
        note(sample, ("method", rollout_id))

    @staticmethod
    def static(args, sample, *, rollout_id):
        note(sample, ("static", rollout_id))


def scaled(factor, args, sample, *, rollout_id, evaluation=None):
    note(sample, (factor, rollout_id, evaluation))


callable_object = Callable()
bound_method = callable_object.method
partial_hook = functools.partial(scaled, 2)
partial_with_fixed_id = functools.partial(scaled, 2, rollout_id=99)
partial_of_all = functools.partial(wants_all, evaluation="fixed")


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("wants_nothing", "marker"),
        ("wants_some", (7, True)),
        (
            "wants_all",
            {"rollout_id": 7, "evaluation": True, "group_index": 4, "weight_version": 2, "ignored": "value"},
        ),
        ("wants_mixed", (4, (), 2, ["evaluation", "ignored", "rollout_id"])),
        ("wants_by_position", (7, True, 5, ["group_index", "ignored", "weight_version"])),
        ("wants_rest", 2),
        ("with_unknown_default", "red"),
        ("callable_object", ("object", True)),
        ("bound_method", ("method", 7)),
        ("Callable.static", ("static", 7)),
        ("partial_hook", (2, 7, True)),
        ("partial_with_fixed_id", (2, 99, True)),
        (
            "partial_of_all",
            {"rollout_id": 7, "group_index": 4, "weight_version": 2, "ignored": "value"} | {"evaluation": "fixed"},
        ),
    ],
)
def test_a_hook_gets_the_arguments_that_its_signature_declares(name, seen):
    sample = Sample(group_index=4, weight_version=2)
    result = run(configured(name, marker="marker"), sample, rollout_id=7, evaluation=True, ignored="value")
    assert result.metadata["seen"] == [seen]


def test_what_the_caller_leaves_out_stands_on_the_sample():
    sample = Sample(rollout_id=5, group_index=4, weight_version=2)
    seen = run(configured("wants_all"), sample).metadata["seen"][0]
    assert seen == {"rollout_id": 5, "evaluation": False, "group_index": 4, "weight_version": 2}


def takes_one(sample):
    return sample


def takes_keywords_only(*, args, sample):
    return sample


def requires_more(args, sample, tokenizer):
    return sample


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("takes_one", r"takes \(sample\); a hook takes \(args, sample\)"),
        ("takes_keywords_only", r"a hook takes \(args, sample\)"),
        ("requires_more", r"requires an argument 'tokenizer'.*rollout_id, evaluation, group_index, weight_version"),
        ("missing", "has no 'missing'"),
        ("HOOK_COUNT", "expected a function"),
    ],
)
def test_a_function_that_is_no_hook_is_refused_when_it_is_loaded(name, message):
    with pytest.raises(InputError, match=rf"--rollout-sample-hook-path.*{name}.*{message}"):
        load_sample_hooks(configured(name))


HOOK_COUNT = 3


def test_a_callable_without_signature_is_called_with_args_and_sample():
    hook = bind_hook("builtins.max", max)
    assert hook.call(1, 2, {"rollout_id": 5}) == 2


def test_a_hook_is_loaded_once_and_its_signature_inspected_once(monkeypatch):
    args = configured("first", "second")
    hooks = load_sample_hooks(args)
    monkeypatch.setattr("hooks.apply.load_function", None)
    monkeypatch.setattr("inspect.signature", None)
    assert load_sample_hooks(args) is hooks
    assert run(args, Sample()).metadata["seen"] == ["first", "second"]


# What a hook returns


@pytest.mark.parametrize("on_error", ["raise", "drop", "fail-sample"])
@pytest.mark.parametrize("name", ["returns_mapping", "returns_text", "returns_generator"])
def test_any_other_return_value_is_a_type_error_naming_the_hook(name, on_error):
    with pytest.raises(TypeError, match=rf"{name} returned .*expected Sample or None"):
        run(configured(name, on_error=on_error), [Sample()])


# A hook that fails


@pytest.mark.parametrize("name", ["fails", "fails_later"])
def test_on_error_raise_names_hook_and_sample_and_keeps_the_cause(name):
    with pytest.raises(
        SampleHookError, match=rf"{name} failed on sample 12 \(group 3\): LookupError: .*no such page"
    ) as caught:
        run(configured(name), Sample(index=12, group_index=3))
    assert isinstance(caught.value.__cause__, LookupError)


def test_on_error_drop_takes_the_sample_out_of_training_and_keeps_the_shape():
    group = [Sample(index=i, status=Status.COMPLETED) for i in range(3)]
    result = run(configured("fails", "first", on_error="drop"), group)
    assert [sample.index for sample in result] == [0, 1, 2]
    assert [sample.remove_sample for sample in result] == [True, False, True]
    assert {sample.status for sample in result} == {Status.COMPLETED}
    assert result[0].metadata[ERROR_KEY] == f"{__name__}.fails: LookupError: no such page"
    assert [sample.metadata.get("seen") for sample in result] == [None, ["first"], None]


def test_on_error_fail_sample_marks_the_sample_as_failed():
    result = run(configured("fails", on_error="fail-sample"), [Sample(index=0), Sample(index=1)])
    assert [sample.status for sample in result] == [Status.FAILED, Status.PENDING]
    assert [sample.remove_sample for sample in result] == [True, False]


def test_a_hook_that_fails_again_and_again_is_logged_once(caplog):
    with caplog.at_level(logging.WARNING):
        run(configured("fails_later", on_error="drop"), [Sample(index=i) for i in range(5)])
    assert len(caplog.records) == 1
    assert "fails_later failed on sample 0" in caplog.text


def test_an_unknown_policy_is_refused():
    with pytest.raises(InputError, match="--rollout-sample-hook-on-error 'ignore'"):
        load_sample_hooks(configured("first", on_error="ignore"))


async def waits(args, sample):
    await asyncio.sleep(3600)


def test_cancelling_the_task_is_not_a_failure_of_the_hook():
    async def cancel():
        task = asyncio.create_task(apply_rollout_sample_hooks(configured("waits", on_error="drop"), Sample()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())


# The rollout id


async def wants_id_after_a_while(args, sample, *, rollout_id):
    for _ in range(3):
        await asyncio.sleep(0)
    note(sample, rollout_id)


def test_overlapping_rollouts_never_mislabel_a_sample():
    async def rollout(rollout_id):
        set_current_rollout_id(rollout_id)
        groups = [[Sample(index=i, rollout_id=rollout_id) for i in range(3)], [Sample(index=9)]]
        return await apply_rollout_sample_hooks(configured("wants_id_after_a_while", "wants_some"), groups)

    async def both():
        return await asyncio.gather(rollout(10), rollout(11))

    for rollout_id, groups in zip((10, 11), asyncio.run(both()), strict=True):
        for sample in [sample for group in groups for sample in group]:
            assert sample.metadata["seen"] == [rollout_id, (rollout_id, False)]


def test_the_id_of_the_dispatch_wins_over_the_tasks_and_the_callers_over_both():
    async def ids():
        set_current_rollout_id(1)
        args = configured("wants_some")
        plain = await apply_rollout_sample_hooks(args, Sample())
        dispatched = await apply_rollout_sample_hooks(args, Sample(rollout_id=2))
        explicit = await apply_rollout_sample_hooks(args, Sample(rollout_id=2), rollout_id=3)
        return [sample.metadata["seen"][0][0] for sample in (plain, dispatched, explicit)]

    assert asyncio.run(ids()) == [1, 2, 3]


def test_an_id_set_in_one_task_is_not_seen_in_another_that_exists():
    async def look():
        async def other():
            await asyncio.sleep(0)
            return current_rollout_id()

        set_current_rollout_id(None)
        task = asyncio.create_task(other())
        set_current_rollout_id(8)
        return await task, current_rollout_id()

    assert asyncio.run(look()) == (None, 8)


def test_settings_that_change_under_the_same_object_are_noticed():
    args = configured("first")
    assert run(args, Sample()).metadata["seen"] == ["first"]
    args.rollout_sample_hook_path = [f"{__name__}.second"]
    assert run(args, Sample()).metadata["seen"] == ["second"]
    args.rollout_sample_hook_path.append(f"{__name__}.fails")
    with pytest.raises(SampleHookError):
        run(args, Sample())
    args.rollout_sample_hook_on_error = "drop"
    assert run(args, Sample()).remove_sample


def test_a_sample_that_a_hook_made_anew_has_the_numbers_of_the_one_it_replaces():
    given = Sample(index=3, group_index=1, rollout_id=7, prompt_row=4, epoch=0, source="a", weight_version=2)
    [result] = run(configured("replaces"), [given])
    assert (result.group_index, result.rollout_id, result.prompt_row, result.source) == (1, 7, 4, "a")
    assert (result.weight_version, result.response) == (2, "new")
