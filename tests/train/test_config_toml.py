"""Configuration files: reading, refusing with file and line, and writing so that reading gives the same run."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samples.errors import InputError
from train.config.cli import parse, parse_known, to_toml, write_config
from train.config.flags import Flag, flags
from train.config.run import RunConfig
from train.config.settings import build


@pytest.fixture
def read(tmp_path):
    def _read(text: str | bytes, *argv: str) -> dict[str, object]:
        file = tmp_path / "run.toml"
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return parse_known(["--config", str(file), *argv])

    return _read


@pytest.fixture
def refusal(read):
    def _refusal(text: str | bytes) -> str:
        with pytest.raises(InputError) as refused:
            read(text)
        return str(refused.value)

    return _refusal


@pytest.mark.parametrize(
    "text",
    [
        "rollout_top_p = 0.9\nseed = 3\n",
        "rollout-top-p = 0.9\nseed = 3\n",
        "[rollout]\nrollout_top_p = 0.9\n[job]\nseed = 3\n",
        "seed = 3\n[rollout]\nrollout-top-p = 0.9\n",
        "job.seed = 3\nrollout.rollout_top_p = 0.9\n",
        "job = { seed = 3 }\nrollout = { rollout_top_p = 0.9 }\n",
        "rollout_top_p = 0.9\nseed = 3\n[run]\ntorch = '2'\nseed = 'ignored'\n",
    ],
)
def test_names_may_be_flat_or_in_tables_with_either_dash(read, text):
    assert read(text) == {"rollout_top_p": 0.9, "seed": 3}


def test_values_have_toml_types_and_none_clears(read):
    text = 'prompt_data = ["a", "b"]\nlabel_key = "none"\nrollout_stop = "none"\nlr = 1\nbf16 = true\n'
    assert read(text) == {"prompt_data": ("a", "b"), "label_key": None, "rollout_stop": (), "lr": 1.0, "bf16": True}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('seed = 1\nlr = "fast"\n', "run.toml line 2: lr = fast: must be a number > 0"),
        ('seed = "1"\n', "run.toml line 1: seed = 1: must be a whole number"),
        ("seed = true\n", "line 1: seed = true: must be a whole number"),
        ("bf16 = 1\n", "line 1: bf16 = 1: must be true or false"),
        ("seed = 1.5\n", "must be a whole number"),
        ('prompt_data = "a"\n', "prompt_data = a: must be a list, each text"),
        ("[rollout]\nrollout_temperature = 0.0\n", "line 2: rollout_temperature = 0.0: must be a number > 0 (greedy"),
        ("rollout_temperature = nan\n", "rollout_temperature = nan: must be"),
        ("rollout_batchsize = 3\n", "line 1: rollout_batchsize: unknown key; did you mean rollout_batch_size?"),
        ("[rollout]\nlr = 1e-3\n", "line 2: lr: stands in [rollout] but belongs in [optimizer]"),
        ("[rolout]\nseed = 1\n", "[rolout] is no table of settings; did you mean [rollout]?"),
        ("lr = 1e-3\n[optimizer]\nlr = 1e-4\n", "lr: given more than once"),
        ("rollout_top_p = 1.0\nrollout-top-p = 0.9\n", "given more than once"),
        ("rollout = 3\n", "line 1: rollout: is a table of settings"),
        (
            'fp8_recipe = "x"\n',
            "fp8_recipe: slime's setting, not one of accelrl's: this version has no low-precision training",
        ),
        ("seed = \n", "not valid TOML"),
        (b"seed = 1 # \xff\n", "not UTF-8 text (byte 11)"),
    ],
)
def test_what_cannot_be_used_is_named_with_file_and_line(refusal, text, said):
    assert said in refusal(text)


def test_a_key_in_a_comment_does_not_move_the_line(refusal):
    assert "line 2: lr =" in refusal('# lr = "x"\nlr = "x"\n')


def test_a_file_that_is_not_there_or_a_directory_is_refused(tmp_path):
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(InputError, match=f"--config {path}: cannot be read"):
            parse(["--config", str(path)])


def test_problems_of_file_and_command_line_are_told_together(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("sed = 1\n")
    with pytest.raises(InputError) as refused:
        parse(["--config", str(file), "--lr", "x"])
    assert "run.toml line 1: sed: unknown key" in str(refused.value)
    assert "--lr x" in str(refused.value)


def values_of(flag: Flag) -> st.SearchStrategy[object]:
    """Values that may stand in a field, bounds aside."""
    text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda word: word != "none")
    one: st.SearchStrategy[object] = {
        bool: st.booleans(),
        int: st.integers(2, 9),
        float: st.floats(1e-9, 0.99),
        str: st.sampled_from(flag.choices) if flag.choices else text,
    }[flag.kind]
    if flag.many:
        return st.lists(one, max_size=3).map(tuple)
    return st.none() | one if flag.optional else one


@settings(max_examples=30, deadline=None)
@given(st.fixed_dictionaries({}, optional={name: values_of(flag) for name, flag in flags().items()}))
def test_reading_what_was_written_gives_the_same_configuration(tmp_path_factory, values):
    config = build(values)
    file = tmp_path_factory.mktemp("toml") / "config.toml"
    write_config(config, file, {"accelerator": "cpu", "why": None, "threads": 2})
    assert build(parse_known(["--config", str(file)])) == config


def test_a_written_configuration_wins_over_the_base_that_it_was_made_with(tmp_path):
    base = {"label_key": "answer", "num_rollout": 5}
    config = parse(["--label-key", "none", "--rm-type", "reasoning_gym"], base)
    (tmp_path / "c.toml").write_text(to_toml(config))
    assert parse(["--config", str(tmp_path / "c.toml")], base) == config


def test_facts_are_in_the_file_and_ignored_when_it_is_read(tmp_path):
    file = tmp_path / "config.toml"
    write_config(RunConfig(), file, {"engine": "torch", "seed": 9})
    assert 'engine = "torch"' in file.read_text()
    assert parse(["--config", str(file)]) == RunConfig()
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]
