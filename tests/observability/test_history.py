import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from observability.formats import compact, duration, sparkline, time_split
from observability.history import CURVE_POINTS, History, summary_line


def history_of(rewards, seconds=0.5):
    history = History()
    for step, reward in enumerate(rewards):
        history.add(step, {"rollout/raw_reward": reward, "perf/step_time": seconds})
    return history


def test_the_summary_compares_the_first_ten_steps_with_the_last_ten():
    line = summary_line(history_of([0.0] * 10 + [0.5] * 130 + [1.0] * 10), "runs/7")
    assert line == (
        "Mean reward rose to 1.000 over the last 10 steps, from 0.000 over the first 10, "
        "after 150 steps (1:15); run directory: runs/7"
    )


@pytest.mark.parametrize(
    ("rewards", "told"),
    [
        ([], "No rewards after 0 steps (0.0 s)"),
        ([0.25], "Mean reward 0.250 after 1 step (0.5 s)"),
        ([0.0, 1.0, 1.0], "rose to 1.000 over the last step, from 0.000 over the first"),
        ([1.0] * 6 + [0.0] * 6, "fell to 0.000 over the last 6 steps, from 1.000 over the first 6"),
        ([0.5] * 30, "Mean reward unchanged at 0.500 over the last 10 steps, after 30 steps"),
        ([math.nan, math.nan], "No rewards after 2 steps"),
        ([0.0, math.nan, 1.0], "rose to 1.000 over the last step, from 0.000 over the first, after 3 steps"),
    ],
)
def test_the_summary_of_short_and_odd_runs(rewards, told):
    line = summary_line(history_of(rewards), "runs/7")
    assert told in line
    assert line.endswith("run directory: runs/7")


def test_an_interrupted_run_says_so():
    assert "interrupted after 30 steps" in summary_line(history_of([0.5] * 30), "runs/7", interrupted=True)


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=1500), st.integers(1, 60))
def test_the_curve_is_bounded_and_keeps_range_and_order(rewards, points):
    history = history_of(rewards)
    curve = history.curve(points)
    assert 1 <= len(curve) <= points
    assert len(history._curve) <= CURVE_POINTS
    assert len(history._open) < history._stride
    assert min(rewards) - 1e-9 <= min(curve) <= max(curve) <= max(rewards) + 1e-9
    rising = history_of(sorted(rewards)).curve(points)
    assert all(left <= right + 1e-9 for left, right in pairwise(rising))


def test_the_curve_of_a_short_run_is_the_rewards_themselves():
    assert history_of([0.0, 0.5, 1.0]).curve(40) == [0.0, 0.5, 1.0]
    assert History().curve(40) == []


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0.0 s"), (8.24, "8.2 s"), (59.97, "1:00"), (185, "3:05"), (7385, "2:03:05")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize("number_text", [(0, "0"), (950.4, "950"), (999.99, "1.0k"), (18211, "18.2k"), (1.3e6, "1.3M")])
def test_compact_numbers(number_text):
    assert compact(number_text[0]) == number_text[1]


def test_sparklines_go_from_lowest_to_highest():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([5, 5]) == "▁▁"
    assert sparkline([]) == ""


def test_the_time_split_adds_what_is_left_over():
    split = time_split({"perf/step_time": 2.0, "perf/rollout_time": 1.0, "perf/train_time": 0.5})
    assert split == [("rollout", 0.5), ("train", 0.25), ("other", 0.25)]
    assert time_split({"perf/step_time": 1.0, "perf/rollout_time": 1.5}) == [("rollout", 1.5)]
    assert time_split({}) == []
