"""What a prompt file may hold, and what is said about one that cannot be used."""

import json
import os
import re
import tracemalloc

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from samples import InputError
from samples.config import DataConfig
from samples.prompts import PromptSet
from samples.slices import RowSlice, parse_file_spec


def prompts(*specs: str, **config) -> PromptSet:
    return PromptSet(DataConfig(prompt_data=specs, **config))


def texts(prompt_set: PromptSet) -> list:
    return [prompt_set.read(row).prompt for row in range(len(prompt_set))]


def write(tmp_path, content: bytes, name: str = "p.jsonl") -> str:
    (tmp_path / name).write_bytes(content)
    return str(tmp_path / name)


GOOD = b'{"prompt": "good", "label": 1}\n'
BAD_LINES = {
    "broken": (b'{"prompt": "a", "label": ', r"line 2: is not JSON: .* at column \d+"),
    "two objects": (GOOD.strip() * 2, "line 2: is not JSON"),
    "list": (b'["a", "b"]', "line 2: is a JSON array, expected an object"),
    "number": (b"3", "line 2: is a JSON number"),
    "null": (b"null", "line 2: is a JSON null"),
    "missing prompt": (
        b'{"question": "a", "label": 1}',
        r"line 2: field 'prompt' is missing; there are 'label', 'question' \(--input-key names",
    ),
    "missing label": (b'{"prompt": "a"}', r"line 2: field 'label' is missing; there are 'prompt' \(--label-key"),
    "no field": (b"{}", "line 2: field 'prompt' is missing; there are no fields"),
    "null prompt": (b'{"prompt": null, "label": 1}', "line 2: field 'prompt' is null"),
    "null label": (b'{"prompt": "a", "label": null}', "line 2: field 'label' is null"),
    "NaN label": (b'{"prompt": "a", "label": NaN}', "line 2: is not JSON: holds NaN"),
    "empty prompt": (b'{"prompt": "", "label": 1}', "line 2: field 'prompt' is an empty prompt"),
    "blank prompt": (b'{"prompt": " \\n", "label": 1}', "line 2: field 'prompt' is an empty prompt"),
    "prompt of another kind": (
        b'{"prompt": 3, "label": 1}',
        "line 2: field 'prompt' is int 3, expected text or a list",
    ),
    "invalid UTF-8": (b'{"prompt": "a\xff", "label": 1}', "line 2: byte 0xff at column 14 is not UTF-8"),
    "half surrogate": (b'{"prompt": "a\\ud800", "label": 1}', "line 2: the prompt holds half of a surrogate pair"),
    "half surrogate in the metadata": (
        b'{"prompt": "a", "label": 1, "metadata": {"k": ["\\uDC00"]}}',
        "line 2: the metadata holds half of a surrogate pair",
    ),
    "metadata": (
        b'{"prompt": "a", "label": 1, "metadata": [1]}',
        r"line 2: field 'metadata' is list \[1\], expected a mapping \(--metadata-key",
    ),
    "no messages": (b'{"prompt": [], "label": 1}', "line 2: field 'prompt' is an empty list"),
    "message of another kind": (b'{"prompt": ["a"], "label": 1}', "line 2: field 'prompt', message 1 is str 'a'"),
    "message without role": (
        b'{"prompt": [{"role": "user", "content": "a"}, {"content": "a"}], "label": 1}',
        "line 2: field 'prompt', message 2: 'role' is missing",
    ),
    "message without content": (
        b'{"prompt": [{"role": "user"}], "label": 1}',
        "line 2: field 'prompt', message 1: 'content' is missing",
    ),
    "content of another kind": (
        b'{"prompt": [{"role": "user", "content": 3}], "label": 1}',
        "line 2: .*message 1: 'content' is int 3, expected text or a list of parts",
    ),
    "empty messages": (b'{"prompt": [{"role": "user", "content": " "}], "label": 1}', "line 2: .* is an empty prompt"),
    "nested too deep": (b"[" * 200_000, "line 2: is not usable JSON: nested too deep"),
    "number too long": (b'{"prompt": ' + b"1" * 5000 + b"}", "line 2: is not usable JSON: Exceeds the limit"),
}


@pytest.mark.parametrize(("line", "message"), BAD_LINES.values(), ids=BAD_LINES)
def test_a_row_that_cannot_be_used_names_file_line_and_field(tmp_path, line, message):
    path = write(tmp_path, GOOD + line + b"\n" + GOOD)
    with pytest.raises(InputError, match=rf"p\.jsonl, {message}.*--skip-bad-rows"):
        prompts(path)


@pytest.mark.parametrize(("line", "message"), BAD_LINES.values(), ids=BAD_LINES)
def test_skip_bad_rows_skips_and_counts_them(tmp_path, line, message):
    prompt_set = prompts(write(tmp_path, GOOD + line + b"\n" + GOOD), skip_bad_rows=True)
    assert texts(prompt_set) == ["good", "good"]
    assert prompt_set.bad_rows.count == 1
    assert prompt_set.location(1).endswith("p.jsonl, line 3")


def test_a_source_key_asks_for_a_name_in_every_row(tmp_path):
    path = write(tmp_path, b'{"prompt": "a", "label": 1, "set": "easy"}\n{"prompt": "a", "label": 1, "set": 3}\n')
    with pytest.raises(InputError, match=r"line 2: field 'set' is int 3, expected a name \(--source-key"):
        prompts(path, source_key="set")
    with pytest.raises(InputError, match=r"line 1: field 'from' is missing.*--source-key"):
        prompts(path, source_key="from")
    assert prompts(path, source_key="set", skip_bad_rows=True).read(0).source == "easy"


def test_a_metadata_key_that_no_row_has_is_an_error_only_if_it_was_chosen(tmp_path):
    path = write(tmp_path, GOOD)
    assert prompts(path).read(0).metadata is None
    with pytest.raises(InputError, match="--metadata-key extra: no row of"):
        prompts(path, metadata_key="extra")


def test_fields_can_have_other_names_and_labels_any_value(tmp_path):
    rows = [{"q": "a", "a": {"deep": [1]}, "prompt": 7}, {"q": [{"role": "user", "content": "b"}], "a": ""}]
    path = write(tmp_path, "\n".join(map(json.dumps, rows)).encode())
    prompt_set = prompts(path, input_key="q", label_key="a")
    assert [prompt_set.read(row).label for row in (0, 1)] == [{"deep": [1]}, ""]
    assert texts(prompt_set) == ["a", [{"role": "user", "content": "b"}]]


def test_a_message_that_only_calls_tools_needs_no_content(tmp_path):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]
    path = write(tmp_path, json.dumps({"prompt": messages, "label": 1}).encode())
    assert texts(prompts(path)) == [messages]


def test_blank_lines_are_no_rows_but_count_as_lines(tmp_path):
    path = write(tmp_path, b"\n  \n" + GOOD + b"\t\r\n" + GOOD + b"\n\n")
    prompt_set = prompts(path)
    assert len(prompt_set) == 2
    assert [prompt_set.location(row)[-6:] for row in (0, 1)] == ["line 3", "line 5"]


@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte order mark"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("last", [True, False], ids=["last line ended", "last line open"])
def test_line_ends_and_byte_order_marks_of_other_systems_are_read(tmp_path, start, end, last):
    lines = [json.dumps({"prompt": text, "label": 1}, ensure_ascii=False).encode() for text in ("é", "a b", "😀")]
    path = write(tmp_path, start + end.join(lines) + (end if last else b""))
    assert texts(prompts(path)) == ["é", "a b", "😀"]


def test_a_file_in_another_encoding_is_named_as_such(tmp_path):
    with pytest.raises(InputError, match="line 1: byte 0xff at column 1 is not UTF-8"):
        prompts(write(tmp_path, GOOD.decode().encode("utf-16")))


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xef\xbb\xbf"], ids=["empty", "blank", "byte order mark only"])
def test_a_file_without_rows_is_an_error(tmp_path, content):
    with pytest.raises(InputError, match="no usable row: the file is empty"):
        prompts(write(tmp_path, content))


def test_a_file_with_no_usable_row_is_an_error_even_when_bad_rows_are_skipped(tmp_path):
    with pytest.raises(InputError, match=r"no usable row; 2 cannot be used, the first: .*line 1: is not JSON"):
        prompts(write(tmp_path, b"{\n[]\n"), skip_bad_rows=True)


def test_paths_that_are_no_prompt_file_are_errors(tmp_path):
    write(tmp_path, GOOD, "inside.jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(InputError, match=r"--prompt-data .*absent\.jsonl: no such file"):
        prompts(str(tmp_path / "absent.jsonl"))
    with pytest.raises(InputError, match=r"is a directory; name a file in it, such as inside\.jsonl"):
        prompts(str(tmp_path))
    with pytest.raises(InputError, match=r"unsupported suffix '\.csv'; expected \.jsonl .* or \.parquet"):
        prompts(write(tmp_path, GOOD, "p.csv"))
    with pytest.raises(InputError, match="no regular file"):
        prompts(str(tmp_path / "pipe.jsonl"))
    with pytest.raises(InputError, match="--prompt-data is not given"):
        prompts()


def test_a_file_that_changes_under_the_run_is_named(tmp_path):
    path = write(tmp_path, GOOD * 3)
    prompt_set = prompts(path)
    write(tmp_path, b"x" * len(GOOD * 3))
    with pytest.raises(InputError, match=r"line 2: .*changed while it was in use"):
        prompt_set.read(1)


def test_several_files_share_one_numbering(tmp_path):
    rows = {name: b'{"prompt": "%s", "label": 1}\n' % name.encode() for name in "abc"}
    paths = [write(tmp_path, rows[name] * n, f"{name}.jsonl") for name, n in (("a", 2), ("b", 1), ("c", 3))]
    prompt_set = prompts(*paths)
    assert texts(prompt_set) == ["a", "a", "b", "c", "c", "c"]
    assert [p.prompt for p in prompt_set.read_many([5, 0, 2, 1])] == ["c", "a", "b", "a"]
    assert prompt_set.location(3).endswith("c.jsonl, line 1")
    with pytest.raises(IndexError):
        prompt_set.read(6)


# Slices


def numbered(tmp_path, n: int) -> str:
    return write(tmp_path, b"".join(b'{"prompt": "%d", "label": 1}\n\n' % i for i in range(n)))


@settings(max_examples=150, deadline=None)
@given(n=st.integers(1, 12), start=st.none() | st.integers(-15, 15), stop=st.none() | st.integers(-15, 15))
def test_a_slice_is_a_python_slice_of_the_rows(tmp_path_factory, n, start, stop):
    path = numbered(tmp_path_factory.mktemp("slice"), n)
    spec = f"{path}@[{'' if start is None else start}:{'' if stop is None else stop}]"
    expected = [str(i) for i in range(n)][start:stop]
    if expected:
        assert texts(prompts(spec)) == expected
    else:
        with pytest.raises(InputError, match="no row in the slice"):
            prompts(spec)


def test_rows_outside_a_slice_are_neither_read_nor_checked(tmp_path):
    path = write(tmp_path, b"broken\n" + GOOD + b"broken\n")
    assert texts(prompts(f"{path}@[1:2]")) == ["good"]


@pytest.mark.parametrize("spec", ["p.jsonl@[1:2", "p.jsonl@[1]", "p.jsonl@[a:b]", "p.jsonl@[0:4:2]", "p.jsonl@[1.5:]"])
def test_a_slice_that_is_none_is_refused(spec):
    with pytest.raises(InputError, match=r"expected FILE@\[a:b\]"):
        parse_file_spec(spec)


def test_an_at_sign_alone_belongs_to_the_path():
    assert parse_file_spec("me@home/p.jsonl@[1:]") == ("me@home/p.jsonl", RowSlice(1, None))
    assert parse_file_spec("me@home/p.jsonl") == ("me@home/p.jsonl", RowSlice())


# Anything at all


LINE = st.one_of(
    st.binary(max_size=30),
    st.text(max_size=30).map(lambda text: json.dumps({"prompt": text, "label": text}).encode()),
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["prompt", "label", "role", "content", "metadata", "k"]), inner, max_size=4
            )
        ),
        max_leaves=10,
    ).map(lambda value: json.dumps(value).encode()),
)


@settings(max_examples=300, deadline=None)
@given(lines=st.lists(LINE, max_size=5), start=st.sampled_from([b"", b"\xef\xbb\xbf", b"\xff\xfe"]))
@example(lines=[b'{"prompt": "\\ud83d\\ude00", "label": 0}'], start=b"")
@example(lines=[b"\x0c", b"\x00", b"\x1a"], start=b"")
def test_no_bytes_do_anything_but_give_rows_or_an_error_that_names_a_line(tmp_path_factory, lines, start):
    content = start + b"\n".join(lines)
    path = write(tmp_path_factory.mktemp("any"), content)
    strict = attempt(path)
    if isinstance(strict, PromptSet):
        assert strict.bad_rows.count == 0
        assert all(json.dumps(prompt, ensure_ascii=False).encode() for prompt in texts(strict))
    else:
        named = [f"line {n}:" in strict for n in range(1, content.count(b"\n") + 2)]
        assert any(named) or "no usable row: the file is empty" in strict
    lenient = attempt(path, skip_bad_rows=True)
    if isinstance(lenient, PromptSet):
        records = [line for line in content.removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip()]
        assert len(lenient) + lenient.bad_rows.count == len(records)
        assert len(texts(lenient)) == len(lenient)
    else:
        assert "no usable row" in lenient


def attempt(path: str, **config) -> PromptSet | str:
    """The prompts of a file, or what is said about it."""
    try:
        return prompts(path, **config)
    except InputError as error:
        return str(error)


def test_a_large_file_is_read_as_a_stream(tmp_path):
    """A prompt file costs the memory of its index, 8 bytes a row, not its size (here 10 MB)."""
    line = json.dumps({"prompt": "x" * 4000, "label": 1}).encode() + b"\n"
    path = write(tmp_path, line * 2500)
    tracemalloc.start()
    prompt_set = prompts(path)
    for row in range(0, 2500, 50):
        prompt_set.read(row)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 200_000
    assert peak < 800_000


def test_skipped_rows_are_told_with_their_reasons(tmp_path):
    good = json.dumps({"prompt": "x", "label": 1}).encode()
    path = write(tmp_path, b"\n".join([b"nonsense"] * 3 + [b'{"label": 1}'] * 2 + [good]))
    (told,) = prompts(path, skip_bad_rows=True).skipped_rows()
    assert told.endswith(".jsonl: 5 of 6 rows skipped: 3 not JSON, 2 without a usable prompt")
    assert prompts(write(tmp_path, good), skip_bad_rows=True).skipped_rows() == []


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_json_does_not_have_are_refused_with_their_line(tmp_path, value):
    line = f'{{"prompt": "x", "label": 1, "metadata": {{"k": {value}}}}}'
    said = attempt(write(tmp_path, f'{{"prompt": "x", "label": 1}}\n{line}\n'.encode()))
    assert re.search(rf"line 2: is not JSON: holds {value}", said)


def test_rows_that_end_in_carriage_returns_alone_get_a_hint(tmp_path):
    said = attempt(write(tmp_path, b'{"prompt": "x", "label": 1}\r{"prompt": "y", "label": 1}\r'))
    assert "line 1: is not JSON: Extra data" in said
    assert "convert them to line feeds" in said
    assert len(prompts(write(tmp_path, b'{"prompt": "x", "label": 1}\r\n{"prompt": "y", "label": 1}\r\n'))) == 2
