import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samples import DataSource, InputError, Sample, Status
from samples.config import DataConfig
from samples.prompts import PromptSet
from samples.shuffle import epoch_order

from .conftest import build_tokenizer

TOKENIZER = build_tokenizer()


def make_source(path, *, seed=0, n=2, limit=100, **config) -> DataSource:
    config = DataConfig(prompt_data=(path,), **{"label_key": None, **config})
    return DataSource(config, TOKENIZER, seed=seed, n_samples_per_prompt=n, max_prompt_len=limit)


def drawn_rows(groups) -> list[int]:
    return [group[0].prompt_row for group in groups]


def test_a_group_holds_pending_samples_of_one_prompt_with_its_ids(write_jsonl):
    path = write_jsonl([{"prompt": "ab", "label": "x", "metadata": {"k": [1]}, "set": "easy"}])
    source = make_source(path, n=3, label_key="label", source_key="set")
    first, second = source.next_groups(2)
    assert [sample.index for sample in first + second] == [0, 1, 2, 3, 4, 5]
    assert {sample.group_index for sample in first} == {0}
    assert {sample.group_index for sample in second} == {1}
    sample = first[0]
    assert sample.tokens == TOKENIZER.encode("ab", add_special_tokens=False)
    assert (sample.prompt, sample.label, sample.source, sample.status) == ("ab", "x", "easy", Status.PENDING)
    assert (sample.prompt_row, sample.epoch, second[0].epoch) == (0, 0, 1)


def test_samples_of_a_group_share_nothing_that_can_be_changed(write_jsonl):
    message = {"role": "user", "content": "hi"}
    path = write_jsonl([{"prompt": [message], "label": [1], "metadata": {"k": [1]}}])
    first, second = make_source(path, label_key="label").next_groups(1)[0]
    first.tokens.append(0)
    first.metadata["k"].append(2)
    first.label.append(2)
    first.prompt[0]["content"] = "changed"
    assert second.metadata == {"k": [1]}
    assert second.label == [1]
    assert second.prompt == [message]
    assert second.tokens == first.tokens[:-1]


def test_every_epoch_visits_every_prompt_once_in_an_order_of_its_own(write_jsonl):
    source = make_source(write_jsonl({"prompt": f"p{i}"} for i in range(20)))
    epochs = [drawn_rows(source.next_groups(20)) for _ in range(3)]
    assert all(sorted(rows) == list(range(20)) for rows in epochs)
    assert len({tuple(rows) for rows in epochs}) == 3


def test_the_order_depends_on_the_seed_and_not_on_how_many_are_drawn_at_once(write_jsonl):
    path = write_jsonl({"prompt": f"p{i}"} for i in range(20))
    at_once = drawn_rows(make_source(path).next_groups(50))
    source = make_source(path)
    one_by_one = [drawn_rows(source.next_groups(1))[0] for _ in range(50)]
    assert at_once == one_by_one
    assert drawn_rows(make_source(path, seed=1).next_groups(50)) != at_once


def test_without_shuffling_prompts_come_in_file_order(write_jsonl):
    source = make_source(write_jsonl({"prompt": f"p{i}"} for i in range(3)), rollout_shuffle=False)
    assert drawn_rows(source.next_groups(7)) == [0, 1, 2, 0, 1, 2, 0]


def test_the_shuffled_order_stays_what_it_is():
    # Pinned: a resumed run depends on it, whatever the version of NumPy.
    assert epoch_order(8, seed=7, epoch=2, shuffle=True).tolist() == [6, 7, 4, 0, 1, 5, 3, 2]


def test_over_long_prompts_are_skipped_and_counted_once(write_jsonl):
    source = make_source(write_jsonl([{"prompt": "abc"}, {"prompt": "abcdefgh"}, {"prompt": "abcd"}]), limit=4)
    assert set(drawn_rows(source.next_groups(6))) == {0, 2}
    assert source.counts.too_long == 1
    assert source.counts.longest_prompt == 8


def test_the_length_that_filters_is_the_length_that_is_served(write_jsonl):
    # "hi" has 2 tokens, as a rendered chat 4 times as many: the template counts.
    path = write_jsonl([{"prompt": "hi"}])
    served = make_source(path, apply_chat_template=True).next_groups(1)[0][0].tokens
    assert len(make_source(path, apply_chat_template=True, limit=len(served)).next_groups(1)) == 1
    with pytest.raises(InputError):
        make_source(path, apply_chat_template=True, limit=len(served) - 1)


def test_prompts_that_are_all_too_long_are_an_error_at_the_start(write_jsonl):
    with pytest.raises(
        InputError, match=r"none of the 2 .* more than 3 tokens.*--rollout-max-prompt-len.*longest has 5"
    ):
        make_source(write_jsonl([{"prompt": "abcde"}, {"prompt": "abcd"}]), limit=3)


def test_a_prompt_the_template_refuses_names_its_line_or_is_skipped(write_jsonl):
    rows = [{"prompt": [{"role": "forbidden", "content": "hi"}]}, {"prompt": "ab"}]
    path = write_jsonl(rows)
    with pytest.raises(InputError, match=r"line 1: .*roles must be known"):
        make_source(path, rollout_shuffle=False)
    source = make_source(path, rollout_shuffle=False, skip_bad_rows=True)
    assert drawn_rows(source.next_groups(2)) == [1, 1]
    assert source.counts.bad_rows == 1


def test_returned_groups_come_first_and_once(write_jsonl):
    source = make_source(write_jsonl({"prompt": f"p{i}"} for i in range(9)))
    a, b, _ = source.next_groups(3)
    b[0].response = "half"
    source.return_groups([b, a])
    with pytest.raises(ValueError, match="returned twice"):
        source.return_groups([b])
    assert source.next_groups(1) == [b]
    source.return_groups([b])  # drawn again, so it may come back again
    assert source.next_groups(2) == [b, a]
    assert source.next_groups(1)[0][0].group_index == 3


def test_a_group_that_was_never_drawn_cannot_be_returned(write_jsonl):
    source = make_source(write_jsonl([{"prompt": "a"}]))
    with pytest.raises(ValueError, match="not drawn"):
        source.return_groups([[Sample(group_index=0)]])


def test_a_returned_group_can_start_again_from_the_prompt(write_jsonl):
    source = make_source(write_jsonl([{"prompt": "abc"}]))
    (group,) = source.next_groups(1)
    fresh = [Sample.from_dict(json.loads(json.dumps(sample.to_dict()))) for sample in group]
    group[0].tokens.append(1)
    group[0].response_length = 1
    source.return_groups([group], reset=True)
    assert source.next_groups(1) == [fresh]


def test_groups_in_flight_are_drawn_again_from_the_prompt(write_jsonl):
    path = write_jsonl({"prompt": f"p{i}"} for i in range(9))
    source = make_source(path)
    groups = source.next_groups(3)
    groups[1][0].tokens.append(5)  # half-way through its response
    state = json.loads(json.dumps(source.state_dict(in_flight=groups[1:])))
    resumed = make_source(path)
    resumed.load_state_dict(state)
    expected = make_source(path).next_groups(5)
    assert resumed.next_groups(4) == expected[1:]


@pytest.mark.parametrize("change", ["file", "seed", "shuffle"])
def test_a_place_in_other_prompts_is_refused(write_jsonl, change):
    path = write_jsonl([{"prompt": "aa"}, {"prompt": "bb"}])
    state = make_source(path).state_dict()
    other = {
        "file": lambda: make_source(write_jsonl([{"prompt": "aa"}, {"prompt": "bc"}])),  # same size, same rows
        "seed": lambda: make_source(path, seed=1),
        "shuffle": lambda: make_source(path, rollout_shuffle=False),
    }[change]()
    with pytest.raises(InputError, match="resume with the same"):
        other.load_state_dict(state)


def test_a_moved_file_is_still_the_same_prompts(write_jsonl, tmp_path):
    path = write_jsonl({"prompt": f"p{i}"} for i in range(9))
    source = make_source(path)
    source.next_groups(4)
    (tmp_path / "elsewhere").mkdir()
    moved = (tmp_path / "elsewhere" / "prompts.jsonl").absolute()
    moved.write_bytes((tmp_path / "prompts.jsonl").read_bytes())
    resumed = make_source(str(moved))
    resumed.load_state_dict(source.state_dict())
    assert resumed.next_groups(3) == source.next_groups(3)


def test_unfinished_groups_of_another_size_are_refused(write_jsonl):
    path = write_jsonl([{"prompt": "aa"}])
    source = make_source(path, n=2)
    source.return_groups(source.next_groups(1))
    with pytest.raises(InputError, match="resume with --n-samples-per-prompt 2"):
        make_source(path, n=4).load_state_dict(source.state_dict())


def test_an_index_built_in_one_process_serves_in_another(write_jsonl):
    path = write_jsonl({"prompt": f"p{i}"} for i in range(9))
    config = DataConfig(prompt_data=(path,), label_key=None)
    prompts = PromptSet(config)
    prompts.read(0)
    sent = pickle.loads(pickle.dumps(prompts))
    source = DataSource(config, TOKENIZER, seed=0, n_samples_per_prompt=2, max_prompt_len=10, prompts=sent)
    assert source.next_groups(12) == make_source(path).next_groups(12)


@pytest.mark.parametrize(("n", "limit"), [(0, 10), (2, 0)])
def test_sizes_that_make_no_sense_name_their_flag(write_jsonl, n, limit):
    with pytest.raises(InputError, match=r"--n-samples-per-prompt 0|--rollout-max-prompt-len 0"):
        make_source(write_jsonl([{"prompt": "a"}]), n=n, limit=limit)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), rows=st.integers(1, 12), seed=st.integers(0, 2**32 - 1), limit=st.integers(2, 6))
def test_a_resumed_source_draws_what_an_uninterrupted_one_would(tmp_path_factory, data, rows, seed, limit):
    """Draw, hand back, save and restore at random: consumed groups are those of a run never interrupted, in order of
    first drawing none twice and none lost."""
    path = tmp_path_factory.mktemp("source") / "p.jsonl"
    lengths = data.draw(st.lists(st.integers(1, 8), min_size=rows, max_size=rows).filter(lambda ls: min(ls) <= limit))
    path.write_text("".join(json.dumps({"prompt": "a" * length}) + "\n" for length in lengths))
    source, consumed = make_source(str(path), seed=seed, limit=limit), []
    for _ in range(data.draw(st.integers(1, 12))):
        groups = source.next_groups(data.draw(st.integers(0, 5)))
        done = data.draw(st.integers(0, len(groups)))
        consumed += groups[:done]
        held = data.draw(st.integers(done, len(groups)))
        # Of those not consumed, the first stay in flight (lost with the process), the others are handed back.
        source.return_groups(groups[held:])
        if held > done or data.draw(st.booleans()):
            state = json.loads(json.dumps(source.state_dict(in_flight=groups[done:held])))
            source = make_source(str(path), seed=seed, limit=limit)
            source.load_state_dict(state)
    uninterrupted = make_source(str(path), seed=seed, limit=limit).next_groups(len(consumed) + 5)
    assert consumed + source.next_groups(5) == uninterrupted


def test_what_is_skipped_is_told_before_anything_is_drawn(write_jsonl):
    rows = [{"prompt": "a"}, {"prompt": "b" * 30}, {"no": 1}, {"prompt": "c" * 40}]
    source = make_source(write_jsonl(rows), limit=10, skip_bad_rows=True)
    assert source.skipped() == [
        "prompts.jsonl: 1 of 4 rows skipped: 1 without a usable prompt",
        "prompts.jsonl: 2 of the next 3 prompts have more than 10 tokens and are skipped",
    ]
    assert (source.counts.bad_rows, source.counts.too_long) == (1, 2)
    assert make_source(write_jsonl([{"prompt": "a"}])).skipped() == []
