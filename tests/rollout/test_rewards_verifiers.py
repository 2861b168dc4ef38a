import asyncio
import json
import os
import signal
import sys
import threading

import pytest
import reasoning_gym

from rollout.config import RewardConfig
from rollout.rewards import RewardError, build_reward
from rollout.rewards.verifiers import answer_text
from samples.errors import InputError
from samples.sample import Sample


def scored(config, samples, *, afterwards=None):
    """Score in an event loop of its own, outside the main thread: where signals cannot be used."""
    rewards: list = []

    async def score():
        reward = build_reward(config, None)
        try:
            rewards.extend(await reward.score_group(samples))
            if afterwards is not None:
                await afterwards(reward)
        finally:
            await reward.close()

    failure: list = []

    def work():
        try:
            asyncio.run(score())
        except BaseException as error:  # noqa: BLE001 - raised again in the test's own thread
            failure.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return rewards


def test_exact_match_compares_stripped_text():
    pairs = [("7", "7", 1.0), (" 7\n", "7 ", 1.0), ("7", 7, 1.0), ("07", "7", 0.0), ("A", "a", 0.0), ("", "7", 0.0)]
    group = [Sample(response=response, label=label) for response, label, _ in pairs]
    assert scored(RewardConfig(rm_type="exact_match"), group) == [expected for *_, expected in pairs]
    assert [sample.reward for sample in group] == [expected for *_, expected in pairs]


async def test_exact_match_of_one_sample_and_without_a_label():
    reward = build_reward(RewardConfig(rm_type="exact_match"), None)
    assert await reward.score(Sample(response="x", label="x")) == 1.0
    with pytest.raises(InputError, match=r"exact_match: sample 4 has no label.*--label-key"):
        await reward.score(Sample(response="x", index=4))
    await reward.close()


def test_math_knows_equal_answers_outside_the_main_thread():
    pairs = [
        ("so it is \\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("The answer is 1/2.", "\\frac12", 1.0),
        ("first $x=5$, then \\boxed{7}", "7", 1.0),
        ("The answer is $\\sqrt{8}$", "$2\\sqrt{2}$", 1.0),
        ("\\boxed{x+1}", "\\boxed{1+x}", 1.0),
        ("\\boxed{8}", "7", 0.0),
        ("I do not know", "7", 0.0),
        ("", "7", 0.0),
    ]
    group = [Sample(response=response, label=label, index=i) for i, (response, label, _) in enumerate(pairs)]
    assert scored(RewardConfig(rm_type="math"), group) == [expected for *_, expected in pairs]


@pytest.mark.parametrize("label", [None, "", "  "])
async def test_math_without_a_label_is_refused(label):
    reward = build_reward(RewardConfig(rm_type="math"), None)
    with pytest.raises(InputError, match="sample 3 has no label"):
        await reward.score(Sample(response="1", label=label, index=3))
    await reward.close()


def test_an_answer_that_computes_for_ever_costs_its_reward_and_no_more(monkeypatch):
    monkeypatch.setattr("rollout.rewards.isolated.CPU_SECONDS", 0.2)
    counted = {}

    async def count(reward):
        counted.update(reward.counters())

    responses = ["\\boxed{7}", "9**9**9**9", "\\boxed{7}", "$9^{9^{9^{9}}}$"]
    group = [Sample(response=response, label="7", index=i) for i, response in enumerate(responses)]
    assert scored(RewardConfig(rm_type="math", rm_concurrency=1), group, afterwards=count) == [1.0, 0.0, 1.0, 0.0]
    assert counted == {"unscorable": 2}


async def test_a_scoring_process_that_dies_is_replaced():
    reward = build_reward(RewardConfig(rm_type="math", rm_concurrency=1), None)
    sample = Sample(response="7", label="7")
    assert await reward.score(sample) == 1.0
    (process,) = reward._all
    os.kill(process._process.pid, signal.SIGKILL)
    assert await reward.score(sample) == 1.0
    assert reward.counters() == {}
    await reward.close()


async def test_closing_ends_the_scoring_processes_in_the_middle_of_a_score():
    reward = build_reward(RewardConfig(rm_type="math", rm_concurrency=1), None)
    assert await reward.score(Sample(response="7", label="7")) == 1.0
    (process,) = reward._all
    scoring = asyncio.ensure_future(reward.score(Sample(response="9**9**9**9", label="7", index=1)))
    await asyncio.sleep(0.05)
    await reward.close()
    with pytest.raises(RewardError, match="closed before sample 1"):
        await scoring
    assert process._process.poll() is not None


TASKS = ["chain_sum", "countdown", "letter_counting", "word_sorting", "arc_agi"]


def test_real_reasoning_gym_tasks_give_their_own_answers_full_reward():
    group = []
    for task in TASKS:
        for entry in reasoning_gym.create_dataset(task, size=3, seed=1):
            entry = json.loads(json.dumps(entry))  # as it comes out of a prompt file
            assert entry["metadata"]["source_dataset"] == task
            sample = Sample(response=entry["answer"], label=entry["answer"], metadata=entry["metadata"])
            group += [sample, Sample(response="no", label=entry["answer"], metadata=entry["metadata"])]
    rewards = scored(RewardConfig(rm_type="reasoning_gym"), group)
    assert rewards[::2] == [1.0] * (3 * len(TASKS))
    assert max(rewards[1::2]) < 0.1


def test_the_task_and_the_entry_may_come_from_flag_metadata_or_label():
    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=2)[0]
    answer = f"thinking... <answer>{entry['answer']}</answer>"
    group = [
        Sample(response=answer, label=entry["answer"], metadata={"task": "chain_sum"}),
        Sample(response=answer, metadata={"task": "chain_sum", "entry": entry}),
        Sample(response=answer, label=entry),
        Sample(response=answer, label=int(entry["answer"]), metadata={"source_dataset": "chain_sum"}),
    ]
    assert scored(RewardConfig(rm_type="reasoning_gym"), group) == [1.0] * 4
    plain = Sample(response=answer, prompt=entry["question"], label=entry["answer"])
    assert scored(RewardConfig(rm_type="reasoning_gym:chain_sum"), [plain]) == [1.0]


def test_an_unknown_task_is_refused_at_start_with_the_nearest():
    with pytest.raises(InputError, match=r"--rm-type reasoning_gym:chain_sun: .*no task 'chain_sun'; it has chain_sum"):
        build_reward(RewardConfig(rm_type="reasoning_gym:chain_sun"), None)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (Sample(index=6, label="3"), "sample 6 names no task"),
        (Sample(index=6, label="3", metadata={"task": "nope"}), "sample 6: reasoning-gym has no task 'nope'"),
        (Sample(index=6), "sample 6 has no entry"),
        (Sample(index=6, label={"question": "?"}), "sample 6 has no entry"),
        (Sample(index=6, label={"answer": "1", "metadata": 4}), "sample 6 has metadata that is no mapping"),
        (Sample(index=6, label={"answer": {1, 2}}, metadata={"task": "chain_sum"}), "sample 6 is not plain JSON"),
    ],
)
async def test_a_sample_without_a_usable_entry_is_refused(sample, message):
    reward = build_reward(RewardConfig(rm_type="reasoning_gym"), None)
    with pytest.raises(InputError, match=message):
        await reward.score(sample)
    await reward.close()


def test_an_entry_that_its_own_scorer_cannot_use_is_told_from_a_bad_answer():
    broken = Sample(response="b a", label="a b", metadata={"task": "word_sorting"}, index=2)
    with pytest.raises(RewardError, match=r"sample 2 cannot be scored: its scorer raises KeyError.*label 'a b'"):
        scored(RewardConfig(rm_type="reasoning_gym"), [broken])


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("  4 ", "4"),
        ("<answer> 4\n</answer>", "4"),
        ("<answer>3</answer> no, <answer>4</answer>.", "4"),
        ("<answer>4</answer> see <answer>", "4"),
        ("<answer>4", "<answer>4"),
        ("4</answer>", "4</answer>"),
        ("", ""),
    ],
)
def test_the_answer_is_the_last_tagged_one_or_the_whole_response(response, answer):
    assert answer_text(response) == answer


@pytest.mark.parametrize("rm_type", ["exact", "", "math:algebra", "reasoning_gym:", "deepscaler"])
def test_an_unknown_reward_type_is_refused_with_the_choices(rm_type):
    with pytest.raises(InputError, match=r"--rm-type .* exact_match, math, reasoning_gym, remote_rm"):
        build_reward(RewardConfig(rm_type=rm_type), None)


@pytest.mark.skipif(sys.platform != "linux", reason="the memory limit is Linux's")
async def test_a_scoring_process_that_cannot_start_is_an_error(monkeypatch):
    monkeypatch.setattr("rollout.rewards.isolated.MEMORY_BYTES", 1 << 20)
    reward = build_reward(RewardConfig(rm_type="math"), None)
    with pytest.raises(RewardError, match="--rm-type math: a scoring process did not start: it exited with status"):
        await reward.score(Sample(response="7", label="7"))
    await reward.close()


@pytest.mark.parametrize("label", [["7"], {"answer": "7"}])
async def test_exact_match_refuses_a_label_that_no_response_can_equal(label):
    reward = build_reward(RewardConfig(rm_type="exact_match"), None)
    with pytest.raises(
        InputError, match=r"exact_match: the label of prompt row 3 \(sample 4\) is a (list|dict).*--label-key"
    ):
        await reward.score(Sample(response="7", label=label, index=4, prompt_row=3))


async def test_exact_match_takes_a_whole_number_kept_as_a_float_for_the_number():
    reward = build_reward(RewardConfig(rm_type="exact_match"), None)
    expected = {("2", 2.0): 1.0, ("2.0", 2.0): 1.0, ("2.5", 2.5): 1.0, ("2", 2.5): 0.0, ("True", True): 1.0}
    for (response, label), score in expected.items():
        assert await reward.score(Sample(response=response, label=label)) == score
