import datetime
import json
import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samples import DataSource, InputError
from samples.config import DataConfig
from samples.prompts import PromptSet

from .conftest import build_tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]


def write(tmp_path, columns: dict, *, row_group_size: int = 3) -> str:
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size)
    return str(path)


def prompts(*specs: str, **config) -> PromptSet:
    return PromptSet(DataConfig(prompt_data=specs, **{"label_key": None, **config}))


def texts(prompt_set: PromptSet) -> list:
    return [prompt_set.read(row).prompt for row in range(len(prompt_set))]


def test_rows_are_read_across_row_groups_in_any_order(tmp_path):
    prompt_set = prompts(write(tmp_path, {"prompt": [f"p{i}" for i in range(10)], "unused": list(range(10))}))
    assert texts(prompt_set) == [f"p{i}" for i in range(10)]
    assert [p.prompt for p in prompt_set.read_many([9, 0, 4, 3])] == ["p9", "p0", "p4", "p3"]
    assert prompt_set.location(4).endswith("p.parquet, row 5")
    assert texts(pickle.loads(pickle.dumps(prompt_set))) == texts(prompt_set)


def test_messages_labels_metadata_and_sources_come_as_plain_values(tmp_path):
    columns = {
        "prompt": [MESSAGES, [{"role": "user", "content": "ho"}]],
        "label": [["x"], ["y", "z"]],
        "metadata": pa.array([{"k": 1, "deep": {"a": [1.5]}}, None]),
        "set": pa.array(["easy", "hard"]).dictionary_encode(),
    }
    prompt_set = prompts(write(tmp_path, columns), label_key="label", source_key="set")
    first, second = prompt_set.read(0), prompt_set.read(1)
    assert first.prompt == MESSAGES
    assert (first.label, first.metadata, first.source) == (["x"], {"k": 1, "deep": {"a": [1.5]}}, "easy")
    assert (second.label, second.metadata, second.source) == (["y", "z"], None, "hard")


def test_a_column_of_maps_gives_mappings(tmp_path):
    metadata = pa.array([[("a", 1)], [("b", 2)]], type=pa.map_(pa.string(), pa.int64()))
    assert prompts(write(tmp_path, {"prompt": ["a", "b"], "metadata": metadata})).read(1).metadata == {"b": 2}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"prompt": ["a", None]}, r"row 2: field 'prompt' is null"),
        ({"prompt": ["a", " "]}, r"row 2: field 'prompt' is an empty prompt"),
        ({"prompt": [1, 2]}, r"row 1: field 'prompt' is int 1, expected text or a list"),
        ({"prompt": ["a"], "metadata": ["x"]}, r"row 1: field 'metadata' is str 'x', expected a mapping"),
        (
            {"prompt": ["a"], "metadata": [{"when": datetime.datetime(2020, 1, 1)}]},
            r"row 1: the metadata cannot be kept as JSON: .*datetime.*--metadata-key",
        ),
        (
            {"prompt": [[{"role": "user", "content": [{"image": b"raw"}]}]]},
            r"row 1: the prompt cannot be kept as JSON: .*bytes.*--input-key",
        ),
    ],
)
def test_a_row_that_cannot_be_used_names_file_row_and_field(tmp_path, columns, message):
    with pytest.raises(InputError, match=rf"p\.parquet, {message}.*--skip-bad-rows"):
        prompts(write(tmp_path, columns))


def test_text_that_is_not_utf8_is_one_bad_row(tmp_path):
    raw = pa.array([b"a", b"b\xff", b"c"], type=pa.binary()).view(pa.string())
    path = write(tmp_path, {"prompt": raw})
    with pytest.raises(InputError, match=r"row 2: holds text that is not UTF-8"):
        prompts(path)
    prompt_set = prompts(path, skip_bad_rows=True)
    assert texts(prompt_set) == ["a", "c"]
    assert prompt_set.bad_rows.count == 1


def test_columns_that_are_not_there_are_named_beside_those_that_are(tmp_path):
    path = write(tmp_path, {"question": ["a"], "answer": ["b"]})
    with pytest.raises(InputError, match=r"no column 'prompt'; there are 'question', 'answer' \(--input-key"):
        prompts(path)
    with pytest.raises(InputError, match=r"row 1: field 'label' is missing; .*--label-key"):
        prompts(path, input_key="question", label_key="label")


def test_a_file_that_is_no_parquet_is_an_error(tmp_path):
    path = tmp_path / "p.parquet"
    path.write_bytes(b'{"prompt": "a"}\n')
    with pytest.raises(InputError, match=r"p\.parquet: cannot be read as Parquet"):
        prompts(str(path))


def test_a_file_without_rows_is_an_error(tmp_path):
    with pytest.raises(InputError, match="no usable row"):
        prompts(write(tmp_path, {"prompt": pa.array([], type=pa.string())}))


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 12), start=st.none() | st.integers(-15, 15), stop=st.none() | st.integers(-15, 15))
def test_a_slice_is_a_python_slice_of_the_rows(tmp_path_factory, n, start, stop):
    path = write(tmp_path_factory.mktemp("slice"), {"prompt": [str(i) for i in range(n)]}, row_group_size=4)
    spec = f"{path}@[{'' if start is None else start}:{'' if stop is None else stop}]"
    expected = [str(i) for i in range(n)][start:stop]
    if expected:
        assert texts(prompts(spec)) == expected
    else:
        with pytest.raises(InputError, match="no row in the slice"):
            prompts(spec)


def test_a_source_over_parquet_resumes_and_knows_its_file(tmp_path):
    tokenizer = build_tokenizer()

    def source(path) -> DataSource:
        config = DataConfig(prompt_data=(path,), label_key=None)
        return DataSource(config, tokenizer, seed=0, n_samples_per_prompt=2, max_prompt_len=10)

    path = write(tmp_path, {"prompt": [f"p{i}" for i in range(10)], "metadata": [{"i": i} for i in range(10)]})
    running = source(path)
    running.return_groups(running.next_groups(3)[1:])
    state = json.loads(json.dumps(running.state_dict()))
    resumed = source(path)
    resumed.load_state_dict(state)
    assert resumed.next_groups(12) == running.next_groups(12)
    other = source(write(tmp_path, {"prompt": [f"q{i}" for i in range(10)]}))
    with pytest.raises(InputError, match="resume with the same"):
        other.load_state_dict(state)
