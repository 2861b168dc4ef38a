"""Settings of SGLang servers: refused before anything starts where they cannot work or nothing would come of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from accel import select_accelerator
from rollout.deploy.interpreter import check_interpreter, sglang_python
from samples.errors import InputError
from train.config.checks import validate
from train.config.settings import build
from train.prepare import with_absolute_paths, without_places
from train.roles import rollout_settings
from train.servers import resolve_server_devices, resolve_server_logs


def problems(**values):
    try:
        validate(build({"rollout_engine": "sglang"} | values))
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"rollout_num_gpus": 3, "rollout_num_gpus_per_engine": 2}, "--rollout-num-gpus 3 does not hold whole engines"),
        ({"rollout_num_gpus": 0}, "no server would be started"),
        (
            {"rollout_external_engine_addrs": ("nowhere",)},
            "-addrs nowhere: expected host:port",
        ),
        ({"rollout_external_engine_addrs": ("a:1",), "rollout_num_gpus": 1}, "bring their own devices"),
        ({"rollout_external_engine_addrs": ("a:1", "a:1")}, "stands there twice"),
        ({"sglang_router_ip": "h", "sglang_router_port": 1, "router_prometheus_port": 2}, "metrics of its own"),
        ({"sglang_router_ip": "10.0.0.1"}, "--sglang-router-ip 10.0.0.1 needs --sglang-router-port"),
        ({"rollout_min_response_len": 2}, "--rollout-min-response-len 2 with --rollout-engine sglang"),
        ({"sglang_overrides": ("tp_size=2",)}, "--sglang-overrides: tp_size follows from the layout"),
        ({"sglang_overrides": ("mem",)}, "--sglang-overrides mem: expected name=value"),
    ],
)
def test_what_servers_cannot_do_is_refused(values, said):
    assert said in problems(**values)


def write(path, text):
    path.write_text(text)
    return str(path)


def test_a_description_of_servers_is_planned_with_the_runs_flags(tmp_path):
    good = write(tmp_path / "a.yaml", "models: [{name: actor, server_groups: [{num_gpus: 2}]}]")
    assert problems(sglang_config=good) == ""
    assert "needed are 2 devices" in problems(sglang_config=good, rollout_num_gpus=4)
    assert "the file says it" in problems(sglang_config=good, prefill_num_servers=1)
    assert "cannot be read" in problems(sglang_config=str(tmp_path / "none.yaml"))
    wrong = write(
        tmp_path / "b.yaml", "models: [{name: actor, server_groups: [{num_gpus: 3, num_gpus_per_engine: 2}]}]"
    )
    assert "engines of 2 need a multiple of 2 devices, 3 are available" in problems(sglang_config=wrong)
    resolved = with_absolute_paths(build({"rollout_engine": "sglang", "sglang_config": "x.yaml"}))
    assert resolved.sglang.sglang_config == str(Path("x.yaml").absolute())


def test_the_rollout_worker_gets_the_described_layout_and_frozen_models_take_no_turns(tmp_path):
    text = (
        "models:\n- {name: actor, num_gpus_per_engine: 2, server_groups: [{num_gpus: 4}]}\n"
        "- {name: judge, model_path: /m, server_groups: [{num_gpus: 1}]}\n"
    )
    given = {"sglang_config": write(tmp_path / "a.yaml", text), "hf_checkpoint": "/models/a", "rollout_threads": 1}
    layout = rollout_settings(build({"rollout_engine": "sglang"} | given)).layout
    assert [(engine.name, engine.num_devices) for engine in layout.engines] == [
        ("actor-0-regular-0", 2),
        ("actor-0-regular-1", 2),
        ("judge-0-regular-0", 1),
    ]
    assert "with frozen models (judge, --sglang-config)" in problems(sglang_config=given["sglang_config"], offload=True)


def test_prefill_and_decode_apart_are_refused_with_kept_ids_and_on_the_cpu():
    assert "at least one engine has to decode" in problems(prefill_num_servers=2, rollout_num_gpus=2)
    for field, flag in (("rollout_top_p", "--rollout-top-p 0.9"), ("eval_top_p", "--eval-top-p 0.9")):
        assert f"{flag} with prefill and decode apart" in problems(
            prefill_num_servers=1, rollout_num_gpus=2, **{field: 0.9}
        )
    config = build({"rollout_engine": "sglang", "prefill_num_servers": 1, "rollout_num_gpus": 2})
    with pytest.raises(InputError, match="transfer engine moves memory of accelerators, which cpu is not"):
        resolve_server_devices(config, select_accelerator("cpu"))


def test_several_servers_are_accepted_where_the_embedded_engine_is_one():
    assert "--rollout-num-gpus" not in problems(rollout_num_gpus=4, rollout_num_gpus_per_engine=2)
    assert "one embedded engine" in problems(rollout_num_gpus=4, rollout_engine="torch")


def test_settings_of_servers_without_servers_are_refused():
    assert "--router-log-requests: there are no SGLang servers" in problems(
        router_log_requests=True, rollout_engine="torch"
    )


def test_logs_lie_in_the_run_directory_unless_said_and_are_no_part_of_the_repeatable_configuration(tmp_path):
    config = build({"rollout_engine": "sglang"})
    resolved = resolve_server_logs(config, tmp_path)
    assert resolved.sglang.sglang_log_dir == str(tmp_path / "servers")
    repeatable, places = without_places(resolved)
    assert repeatable.sglang.sglang_log_dir is None
    assert places["sglang_log_dir"] == str(tmp_path / "servers")
    asked = build({"rollout_engine": "sglang", "sglang_log_dir": "logs"})
    assert resolve_server_logs(asked, tmp_path).sglang.sglang_log_dir == str(Path("logs").absolute())
    embedded = build({"rollout_engine": "torch"})
    assert resolve_server_logs(embedded, tmp_path) is embedded


def test_a_python_that_cannot_serve_is_refused_with_what_it_lacks(tmp_path):
    with pytest.raises(InputError, match="there is no such file"):
        sglang_python(str(tmp_path / "python"))
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no python >&2\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(InputError, match="is no Python that works: no python"):
        check_interpreter(broken)
    with pytest.raises(InputError, match=r"lacks \['sglang', 'sglang_router'\]"):
        check_interpreter(Path(sys.executable))


def test_without_an_environment_the_way_to_one_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("rollout.deploy.interpreter._CPU_ENVIRONMENT", tmp_path / "none")
    with pytest.raises(InputError, match="run `make sglang-cpu` first"):
        sglang_python(None)
