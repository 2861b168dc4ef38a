"""Whatever stands in a description of servers, a plan is printed or a message that names the place; no traceback."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout.main import main

KEYS = [
    *("models", "sglang", "machines", "name", "model_path", "update_weights", "num_gpus_per_engine", "server_groups"),
    *("external_engine_addrs", "worker_type", "num_gpus", "overrides"),
    *("num_gpus_per_node", "rollout_num_gpus", "actor_num_gpus", "colocate"),
]
PLAIN = (
    st.none()
    | st.booleans()
    | st.integers(-2, 40)
    | st.sampled_from([10**7, 2**70, 1.5, float("nan"), "", "regular", "prefill", "decode", "encoder", "placeholder"])
    | st.sampled_from(["a", "host:1", "a b", "..", "2001-99-99", "\u00e9", "x" * 500])
    | st.text(max_size=4)
)
ANYTHING = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=3), inner),
    max_leaves=12,
)
GROUPS = st.fixed_dictionaries(
    {"num_gpus": st.integers(1, 24) | PLAIN},
    optional={
        "worker_type": st.sampled_from(["regular", "prefill", "decode", "encoder", "placeholder"]) | PLAIN,
        "num_gpus_per_engine": st.sampled_from([1, 2, 4, 8, 16]) | PLAIN,
        "overrides": st.dictionaries(st.sampled_from(["port", "mem_fraction_static", "tp-size"]), PLAIN) | ANYTHING,
    },
)
MODELS = st.fixed_dictionaries(
    {"name": st.sampled_from(["actor", "judge"]) | PLAIN, "server_groups": st.lists(GROUPS, max_size=4) | ANYTHING},
    optional={
        "model_path": PLAIN,
        "update_weights": PLAIN,
        "num_gpus_per_engine": PLAIN,
        "external_engine_addrs": st.lists(PLAIN, max_size=3) | ANYTHING,
    },
)
MACHINES = st.fixed_dictionaries(
    {},
    optional={
        name: st.integers(0, 32) | PLAIN
        for name in ("num_gpus_per_node", "rollout_num_gpus", "actor_num_gpus", "colocate")
    },
)
DOCUMENTS = st.fixed_dictionaries({"models": st.lists(MODELS, max_size=3)}, optional={"machines": MACHINES}) | ANYTHING


def plan(text, suffix, capsys):
    """Exit status, and what was said; an exception is a failure."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / f"layout{suffix}"
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        status = main(["plan", "--config", str(path)])
    return status, capsys.readouterr(), path


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(DOCUMENTS)
def test_a_description_of_any_content_gives_a_plan_or_a_message(capsys, document):
    status, said, _ = plan(json.dumps(document), ".yaml", capsys)  # JSON is YAML
    if status == 0:
        assert said.err == ""
        assert said.out.splitlines()[0].startswith("model")
    else:
        assert status == 2
        assert said.out == ""
        assert said.err.startswith("accelrl: error: ")
        assert "Traceback" not in said.err


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=60), st.sampled_from([".yaml", ".toml"]))
def test_a_file_of_any_text_gives_a_plan_or_a_message_that_names_it(capsys, text, suffix):
    text = "".join(letter for letter in text if not 0xD800 <= ord(letter) <= 0xDFFF)
    status, said, path = plan(text, suffix, capsys)
    assert status in (0, 2)
    assert status == 0 or path.name in said.err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("models: &a [*a]", "models[0]"),
        ("[" * 3000, "not valid YAML"),
        ("models: [{name: a, server_groups: [{num_gpus: 2001-99-99}]}]", "not valid YAML"),
        ("models: [{name: a, server_groups: [{num_gpus: 2000000}]}]", "num_gpus: 2000000: must be less than"),
        ("models: [{name: a, external_engine_addrs: [x]}]", "model a: external_engine_addrs x: expected host:port"),
        (
            "models: [{name: a, server_groups: [{num_gpus: 1, overrides: {tp-size: 2}}]}]",
            "model a, group 0 (regular): overrides: tp_size follows from the layout",
        ),
    ],
)
def test_what_would_not_end_or_start_is_refused_when_it_is_planned(text, words, capsys):
    status, said, _ = plan(text, ".yaml", capsys)
    assert status == 2
    assert words in said.err
