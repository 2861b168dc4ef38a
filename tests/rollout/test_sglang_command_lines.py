"""The command lines that plans make, before the installed SGLang's own argument parser and the router's own.

Prefill and decode apart need a transfer engine between GPUs, so on the CPU their servers are not started.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from accel import select_accelerator
from rollout.deploy.config import SGLangConfig
from rollout.deploy.description import Description, GroupSpec, ModelSpec, WorkerType, read_description
from rollout.deploy.disaggregation import Ports, encoder_urls, router_worker, start_order, take_ports
from rollout.deploy.hosts import LocalHost
from rollout.deploy.interpreter import sglang_python
from rollout.deploy.layout import describe_flags, plan_layout
from rollout.deploy.ports import PortLease
from rollout.deploy.router import router_command
from rollout.engines.pausing import PauseMode
from rollout.engines.sglang.command import ServerSettings, server_command
from samples.errors import InputError
from tests.rollout.sglang_cases import MARKS
from train.example import write_example

pytestmark = MARKS

LAYOUTS = Path(__file__).parent / "layouts"
PARSE = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
from sglang_router.router_args import RouterArgs
def parsed(kind, words):
    parser = argparse.ArgumentParser()
    kind.add_cli_args(parser, **({'use_router_prefix': False} if kind is RouterArgs else {}))
    values = vars(parser.parse_args(words)).items()
    return {key: value for key, value in values if isinstance(value, (str, int, bool, list))}
servers, routers = json.load(sys.stdin)
print(json.dumps([[parsed(ServerArgs, one) for one in servers], [parsed(RouterArgs, one) for one in routers]]))
"""


def command_lines(layout, model_dir=Path("/models/actor")):
    """Of every server and every router of a layout, and what the routers are told, by an engine's name."""
    settings = ServerSettings(model_dir, torch.bfloat16, 4096, 64, None, False, 0, 1, 150000, memory_saver=True)
    config, accelerator = SGLangConfig(), select_accelerator("cpu")
    servers, routers, workers, lease = [], [], {}, PortLease()
    for model in layout.models:
        host = LocalHost(lease)
        ports = {plan.name: asyncio.run(take_ports(plan, model, host.take_port)) for plan in model.engines}
        urls = {name: f"http://127.0.0.1:{held.http}" for name, held in ports.items()}
        encoders = encoder_urls(model, urls)
        for plan in (plan for wave in start_order(model) for plan in wave):
            held = ports[plan.name]
            words = server_command(
                Path("p"), plan, settings, config, accelerator, host="127.0.0.1", ports=held, encoders=encoders
            )
            servers.append(words[3:])
            workers[plan.name] = router_worker(plan, urls[plan.name], held)
        words = router_command(
            Path("p"),
            config,
            host="127.0.0.1",
            port=lease.take(),
            prometheus_port=lease.take(),
            log_dir=Path("/logs"),
            disaggregated=model.disaggregated,
        )
        routers.append(words[3:])
    lease.close()
    return servers, routers, workers


def parsed(servers, routers):
    """As SGLang and the router understand them."""
    done = subprocess.run(
        [str(sglang_python(None)), "-c", PARSE],
        input=json.dumps([servers, routers]),
        env={"SGLANG_USE_CPU_ENGINE": "1", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_prefill_decode_and_a_frozen_model_become_command_lines_that_sglang_and_its_router_take():
    layout = plan_layout(read_description(LAYOUTS / "prefill_decode_and_frozen.yaml"))
    servers, routers, workers = command_lines(layout)
    taken, before = parsed(servers, routers)
    assert [one["disaggregation_mode"] for one in taken] == ["prefill", "prefill", "decode", "decode", "null"]
    assert [one["tp_size"] for one in taken] == [2, 2, 4, 4, 4]
    assert all(one["enable_memory_saver"] for one in taken)
    assert [one["load_format"] for one in taken] == ["dummy"] * 4 + ["auto"]
    assert [one["model_path"] for one in taken] == ["/models/actor"] * 4 + ["/models/judge"]
    assert [one["pd_disaggregation"] for one in before] == [True, False]
    assert [one["log_level"] for one in before] == ["warn", "warn"]
    told = list(workers.values())
    assert [one.worker_type for one in told] == ["prefill", "prefill", "decode", "decode", "regular"]
    bootstrap = [one["disaggregation_bootstrap_port"] for one in taken[:2]]
    assert [one.bootstrap_port for one in told] == [*bootstrap, None, None, None]
    held = [one["port"] for one in (*taken, *before)] + bootstrap + [one["prometheus_port"] for one in before]
    assert len(set(held)) == len(held)


def test_prefill_and_decode_servers_pass_sglangs_own_checks_beyond_the_parser(tmp_path):
    """Those need a model that is there. What comes next, the transfer engine, needs GPUs."""
    layout = plan_layout(describe_flags(rollout_num_gpus=2, prefill_num_servers=1))
    servers, _, _ = command_lines(layout, write_example(tmp_path, 0).hf_checkpoint)
    code = (
        "import json, sys; from sglang.srt.server_args import prepare_server_args\n"
        "for words in json.load(sys.stdin): print(prepare_server_args(words).disaggregation_mode)"
    )
    done = subprocess.run(
        [str(sglang_python(None)), "-c", code],
        input=json.dumps(servers),
        env={"SGLANG_USE_CPU_ENGINE": "1", "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-2:] == ["prefill", "decode"]


def test_encoders_come_first_and_the_language_servers_are_told_where_they_are():
    groups = (
        GroupSpec(worker_type=WorkerType.PREFILL, num_gpus=2),
        GroupSpec(worker_type=WorkerType.DECODE, num_gpus=1),
        GroupSpec(worker_type=WorkerType.PLACEHOLDER, num_gpus=1),
        GroupSpec(worker_type=WorkerType.ENCODER, num_gpus=2, overrides={"encoder_transfer_backend": "mooncake"}),
    )
    layout = plan_layout(Description(models=(ModelSpec(name="eyes", server_groups=groups),)))
    servers, routers, workers = command_lines(layout)
    taken, _ = parsed(servers, routers)
    assert [one["encoder_only"] for one in taken] == [True, True, False, False, False]
    assert [one["language_only"] for one in taken] == [False, False, True, True, False]
    assert [one["load_format"] for one in taken] == ["auto", "auto", "dummy", "dummy", "dummy"]
    assert [one["encoder_transfer_backend"] for one in taken] == ["mooncake"] * 2 + ["auto"] * 3
    where = [f"http://127.0.0.1:{one['port']}" for one in taken[:2]]
    assert [one["encoder_urls"] for one in taken] == [[], [], where, where, []]
    assert taken[2]["encoder_bootstrap_port"] != taken[3]["encoder_bootstrap_port"]
    assert [worker is None for worker in workers.values()] == [True, True, False, False, False]


def test_overrides_reach_sglang_as_they_are_written():
    overrides = {"chunked_prefill_size": 512, "json_model_override_args": {"a": 1}, "disable_radix_cache": True}
    group = GroupSpec(num_gpus=1, overrides=overrides)
    layout = plan_layout(Description(models=(ModelSpec(name="actor", server_groups=(group,)),)))
    ((one,), _) = parsed(*command_lines(layout)[:2])
    assert (one["chunked_prefill_size"], one["disable_radix_cache"]) == (512, True)
    assert json.loads(one["json_model_override_args"]) == {"a": 1}


def test_generation_in_place_goes_without_a_prefix_cache_and_refuses_one():
    layout = plan_layout(read_description(LAYOUTS / "prefill_decode_and_frozen.yaml"))
    settings = ServerSettings(
        Path("/models/actor"), torch.bfloat16, 4096, 64, None, False, 0, 1, 150000, pause_mode=PauseMode.IN_PLACE
    )
    plan, ports, accelerator = layout.engines[0], Ports(30000, 30001), select_accelerator("cpu")
    given = (Path("p"), plan, settings)
    assert "--disable-radix-cache" in server_command(*given, SGLangConfig(), accelerator, host="h", ports=ports)
    config = SGLangConfig(sglang_overrides=("disable_radix_cache=false",))
    with pytest.raises(InputError, match=r"disable_radix_cache=false .* --pause-generation-mode in_place"):
        server_command(*given, config, accelerator, host="h", ports=ports)
    retract = replace(settings, pause_mode=PauseMode.RETRACT)
    assert "--disable-radix-cache" not in server_command(
        Path("p"), plan, retract, config, accelerator, host="h", ports=ports
    )
