import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from observability.transcripts import (
    LATEST,
    MAX_CHARACTERS,
    Transcripts,
    by_step,
    choose_steps,
    pick_transcripts,
    read_transcripts,
    shorten,
)
from samples.sample import Sample, Status


def group(index, *rewards):
    return [
        Sample(prompt=f"p{index}", response=f"r{index}.{i}", reward=reward, index=index * 10 + i, group_index=index,
               status=Status.COMPLETED, response_length=3)
        for i, reward in enumerate(rewards)
    ]  # fmt: skip


def chosen(transcripts):
    return [(t["rank"], t["index"], t["reward"]) for t in transcripts]


def test_best_and_worst_come_from_different_prompts_where_there_are_enough():
    groups = [group(0, 1.0, 0.9, 0.0), group(1, 0.8, 0.2), group(2, 0.5, -1.0)]
    assert chosen(pick_transcripts(groups, 4)) == [
        ("best", 0, 1.0),
        ("best", 10, 0.8),
        ("worst", 2, 0.0),
        ("worst", 21, -1.0),
    ]


def test_equal_rewards_are_decided_by_index_whatever_the_order_of_the_groups():
    groups = [group(i, 0.0, 1.0) for i in range(5)]
    first = pick_transcripts(groups, 4)
    assert first == pick_transcripts(groups[::-1], 4)
    assert chosen(first) == [("best", 1, 1.0), ("best", 11, 1.0), ("worst", 30, 0.0), ("worst", 40, 0.0)]


@pytest.mark.parametrize(("count", "expected"), [(0, 0), (1, 1), (3, 3), (64, 6)])
def test_no_sample_is_taken_twice(count, expected):
    picked = pick_transcripts([group(0, 1.0, 0.5, 0.0), group(1, 0.1, 0.2, 0.3)], count)
    assert len(picked) == len({t["index"] for t in picked}) == expected


def test_samples_without_a_reward_are_passed_over_and_nested_ones_found():
    assert chosen(pick_transcripts([[group(0, None), group(1, 0.5)]], 4)) == [("best", 10, 0.5)]
    assert pick_transcripts([], 4) == []


def test_a_reward_that_is_no_number_is_the_worst_and_can_be_written():
    picked = pick_transcripts([group(0, float("nan"), 0.5, -2.0)], 2)
    assert chosen(picked) == [("best", 1, 0.5), ("worst", 0, "nan")]
    json.dumps(picked, allow_nan=False)


def test_a_reward_of_several_values_is_ordered_by_its_key():
    assert chosen(pick_transcripts([group(0, {"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0})], 1, "b")) == [
        ("best", 1, 1.0)
    ]


def test_long_texts_and_chats_are_bounded():
    message = {"role": "user", "content": [{"type": "text", "text": "y" * 9000}]}
    sample = Sample(prompt=[message] * 100, response="x" * 100_000, reward=1.0, label={"answer": "z" * 9000}, index=0)
    (transcript,) = pick_transcripts([[sample]], 1)
    assert len(transcript["prompt"]) == 32
    assert len(json.dumps(transcript)) < 40 * (MAX_CHARACTERS + 200)
    assert "[... 96000 characters left out ...]" in transcript["response"]
    assert shorten("short") == "short"


def samples(step):
    return [{"rank": "best", "response": f"of {step}"}]


def steps_in(path):
    return list(by_step(read_transcripts(path)))


def test_the_file_stays_bounded_and_keeps_first_middle_and_last(tmp_path):
    kept = Transcripts(tmp_path / "samples.jsonl", max_steps=8)
    for step in range(1000):
        kept.add(step, samples(step))
        assert len(read_transcripts(kept.path)) <= 16
    kept.close()
    steps = steps_in(kept.path)
    assert steps[0] == 0
    assert steps[-LATEST:] == [996, 997, 998, 999]
    assert 512 in steps
    assert not list(tmp_path.glob("*.part"))


@given(st.sets(st.integers(0, 10_000), min_size=1, max_size=80), st.integers(LATEST + 2, 30))
def test_kept_steps_are_few_and_hold_both_ends(steps, count):
    ordered = sorted(steps)
    kept = choose_steps(ordered, count)
    assert kept == sorted(set(kept) & steps)
    assert len(kept) <= count
    assert kept[0] == ordered[0]
    assert kept[-LATEST:] == ordered[-LATEST:]


def test_a_run_that_goes_on_from_a_checkpoint_replaces_what_it_makes_again(tmp_path):
    path = tmp_path / "samples.jsonl"
    for steps, mark in ((range(6), ""), (range(4, 7), "again ")):
        kept = Transcripts(path)
        for step in steps:
            kept.add(step, [{"rank": "best", "response": f"{mark}{step}"}])
        kept.close()
    assert [t["response"] for t in read_transcripts(path)] == ["0", "1", "2", "3", "again 4", "again 5", "again 6"]


def test_a_line_cut_off_by_a_kill_is_dropped(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_text('{"step": 0, "response": "a"}\n{"step": 1, "resp')
    kept = Transcripts(path)
    kept.add(1, samples(1))
    kept.add(2, [])
    kept.close()
    assert steps_in(path) == [0, 1]
