"""The command lines that plans make, before the installed SGLang's own argument parser and the router's own.

Prefill and decode apart need a transfer engine between GPUs, so on the CPU their servers are not started.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from accel import select_accelerator
from rollout.deploy.config import SGLangConfig
from rollout.deploy.description import WorkerType, read_description
from rollout.deploy.interpreter import sglang_python
from rollout.deploy.layout import plan_layout
from rollout.deploy.router import router_command
from rollout.engines.pausing import PauseMode
from rollout.engines.sglang.command import Ports, ServerSettings, server_command
from samples.errors import InputError
from tests.rollout.sglang_cases import MARKS

pytestmark = MARKS

LAYOUTS = Path(__file__).parent / "layouts"
PARSE = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
from sglang_router.router_args import RouterArgs
def parsed(kind, words):
    parser = argparse.ArgumentParser()
    kind.add_cli_args(parser, **({'use_router_prefix': False} if kind is RouterArgs else {}))
    return {key: value for key, value in vars(parser.parse_args(words)).items() if isinstance(value, (str, int, bool))}
servers, routers = json.load(sys.stdin)
print(json.dumps([[parsed(ServerArgs, one) for one in servers], [parsed(RouterArgs, one) for one in routers]]))
"""


def test_plans_become_command_lines_that_sglang_and_its_router_take():
    layout = plan_layout(read_description(LAYOUTS / "prefill_decode_and_frozen.yaml"))
    settings = ServerSettings(
        Path("/models/actor"), torch.bfloat16, 4096, 64, None, False, 0, 1, 150000, memory_saver=True
    )
    config, accelerator = SGLangConfig(), select_accelerator("cpu")
    servers = []
    for number, plan in enumerate(layout.engines):
        bootstrap = 9000 + number if plan.worker_type is WorkerType.PREFILL else None
        ports = Ports(30000 + 2 * number, 30001 + 2 * number, bootstrap)
        words = server_command(Path("p"), plan, settings, config, accelerator, host="127.0.0.1", ports=ports)
        servers.append(words[3:])
    routers = [
        router_command(
            Path("p"),
            config,
            host="127.0.0.1",
            port=31000 + number,
            prometheus_port=32000 + number,
            log_dir=Path("/logs"),
            disaggregated=model.disaggregated,
        )[3:]
        for number, model in enumerate(layout.models)
    ]
    done = subprocess.run(
        [str(sglang_python(None)), "-c", PARSE],
        input=json.dumps([servers, routers]),
        env={"SGLANG_USE_CPU_ENGINE": "1", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    taken, before = json.loads(done.stdout.splitlines()[-1])
    assert [one["disaggregation_mode"] for one in taken] == ["prefill", "prefill", "decode", "decode", "null"]
    assert [one["disaggregation_bootstrap_port"] for one in taken[:2]] == [9000, 9001]
    assert [one["tp_size"] for one in taken] == [2, 2, 4, 4, 4]
    assert all(one["enable_memory_saver"] for one in taken)
    assert [one["load_format"] for one in taken] == ["dummy"] * 4 + ["auto"]
    assert [one["model_path"] for one in taken] == ["/models/actor"] * 4 + ["/models/judge"]
    assert [one["pd_disaggregation"] for one in before] == [True, False]
    assert [one["log_level"] for one in before] == ["warn", "warn"]


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
