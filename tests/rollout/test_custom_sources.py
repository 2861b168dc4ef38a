"""A data source that a user gives by path."""

from __future__ import annotations

import json

import pytest

from rollout.testing import EchoTokenizer
from samples import InputError, Sample
from samples.config import DataConfig
from samples.custom_source import CustomDataSource, open_custom_source
from samples.errors import RunError
from tests.rollout.custom_cases import Counting

HERE = __name__


def counting(**settings) -> CustomDataSource:
    return CustomDataSource(
        Counting, DataConfig(), EchoTokenizer(), path="mine.Counting", seed=0, n_samples_per_prompt=2,
        **({"max_prompt_len": 9} | settings),
    )  # fmt: skip


def test_a_custom_source_is_numbered_encoded_and_ends():
    source = counting()
    groups = source.next_groups(3)
    assert [[s.index for s in group] for group in groups] == [[0, 1], [2, 3], [4, 5]]
    assert [group[0].group_index for group in groups] == [0, 1, 2]
    assert groups[1][0].tokens == [ord("1"), ord("=")]
    assert len(source.next_groups(60)) == 47
    assert source.next_groups(1) == []


def test_every_group_of_a_custom_source_comes_once_over_a_save_and_resume():
    source = counting()
    first = source.next_groups(6)
    first[1][0].response, first[1][0].tokens = "half", [1, 2, 3]
    source.return_groups([first[1]])
    source.return_groups([[first[2][0]]], reset=True)
    state = json.loads(json.dumps(source.state_dict([[first[5][0]]])))
    resumed = counting()
    resumed.load_state_dict(state)
    again = resumed.next_groups(60)
    assert [group[0].group_index for group in again] == [5, 2, 1, *range(6, 50)]
    assert again[2][0].response == "half"
    assert [sample.response for sample in again[0]] == ["", ""]
    resumed.return_groups([[again[1][0]]], reset=True)
    assert [s.index for s in resumed.next_groups(1)[0]] == [4, 5]


def test_prompts_that_are_too_long_are_skipped_and_counted():
    source = counting(max_prompt_len=2)
    assert len(source.next_groups(50)) == 10
    assert source.counts.too_long == 40


class Failing(Counting):
    def get_samples(self, n):
        raise LookupError("down")


class Flat(Counting):
    def get_samples(self, n):
        return [Sample(prompt="a")]


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        (
            "tests.rollout.custom_cases.Lacking",
            InputError,
            r"--data-source-path .*Lacking: lacks state_dict, load_state_dict",
        ),
        (f"{HERE}.Failing", RunError, r"Failing.get_samples failed: LookupError: down"),
        (f"{HERE}.Flat", RunError, r"expected a list of groups, each a list of at least one Sample"),
    ],
)
def test_a_custom_source_that_is_none_is_refused_by_name(path, error, message):
    config = DataConfig(data_source_path=path)
    with pytest.raises(error, match=message):
        open_custom_source(
            config, EchoTokenizer(), seed=0, n_samples_per_prompt=2, max_prompt_len=9, user_code_dir=None
        ).next_groups(1)


def test_a_checkpoint_of_other_prompts_is_refused():
    with pytest.raises(InputError, match="was saved without --data-source-path"):
        counting().load_state_dict({"version": 1})
    with pytest.raises(InputError, match="is that of --data-source-path other"):
        counting().load_state_dict({"custom": {}, "path": "other"})
