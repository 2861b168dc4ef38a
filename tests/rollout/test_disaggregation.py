"""Layouts of a run's servers, from a description or from flags, and what servers that do a part of the work need."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from accel import select_accelerator
from rollout.config import RolloutConfig
from rollout.deploy.config import SGLangConfig
from rollout.deploy.description import Description, GroupSpec, Machines, ModelSpec, WorkerType
from rollout.deploy.disaggregation import start_order, take_ports, transfer_problem
from rollout.deploy.hosts import LocalHost
from rollout.deploy.layout import plan_layout
from rollout.deploy.overrides import checked_overrides
from rollout.deploy.ports import PortLease
from rollout.deploy.run_layout import described_problems, run_layout
from rollout.engines.sglang.adopting import check_adopted
from rollout.engines.sglang.command import ServerSettings
from rollout.engines.sglang.engine import SGLangEngine
from rollout.engines.sglang.opening import check_described_models, open_servers
from rollout.engines.sglang.several import SGLangModels
from samples.errors import InputError
from train.example import write_example


def layout_of(*groups, **machines):
    model = ModelSpec(name="actor", server_groups=groups)
    return plan_layout(Description(models=(model,), machines=Machines(**machines)))


def described(path, text):
    path.write_text(text)
    return SGLangConfig(sglang_config=str(path))


def test_a_run_without_a_description_has_one_model_of_equal_servers():
    layout = run_layout(SGLangConfig(), num_gpus=4, num_gpus_per_engine=2)
    assert [engine.name for engine in layout.engines] == ["actor-0-regular-0", "actor-0-regular-1"]
    assert len(run_layout(SGLangConfig(), num_gpus=None, num_gpus_per_engine=2).engines) == 1
    assert run_layout(SGLangConfig(rollout_external_engine_addrs=("a:1",)), num_gpus=None, num_gpus_per_engine=1)


def test_the_short_way_to_prefill_and_decode():
    layout = run_layout(SGLangConfig(prefill_num_servers=1), num_gpus=6, num_gpus_per_engine=2)
    assert [engine.worker_type for engine in layout.engines] == [WorkerType.PREFILL, *[WorkerType.DECODE] * 2]
    assert layout.models[0].disaggregated
    with pytest.raises(InputError, match="at least one engine has to decode"):
        run_layout(SGLangConfig(prefill_num_servers=3), num_gpus=6, num_gpus_per_engine=2)


def test_a_description_decides_the_devices_and_flags_fill_in_what_it_leaves_out(tmp_path):
    config = described(tmp_path / "servers.yaml", "models: [{name: a, server_groups: [{num_gpus: 4}]}]")
    layout = run_layout(config, num_gpus=None, num_gpus_per_engine=2)
    assert [engine.num_devices for engine in layout.engines] == [2, 2]
    with pytest.raises(InputError, match=r"needed are 4 devices .* available are 6"):
        run_layout(config, num_gpus=6, num_gpus_per_engine=2)


def test_servers_of_a_second_node_are_not_started_on_this_machine(model_dir, tmp_path):
    groups = (GroupSpec(num_gpus=1), GroupSpec(num_gpus=1))
    with pytest.raises(InputError, match="engine actor-1-regular-0 lies on node 1, and all servers are started on"):
        opened(layout_of(*groups, num_gpus_per_node=1), model_dir, tmp_path)


def test_a_description_that_contradicts_flags_is_refused_by_name(tmp_path):
    text = "models: [{name: a, server_groups: [{num_gpus: 2}]}]\nmachines: {rollout_num_gpus: 2, colocate: true}"
    config = described(tmp_path / "servers.yaml", text).model_copy(update={"prefill_num_servers": 1})
    said = list(described_problems(config, {"rollout_num_gpus": 4, "colocate": False, "actor_num_gpus": 1}))
    assert "--prefill-num-servers with --sglang-config" in said[0]
    assert "machines.colocate is True, the run's flags say False" in said[1]
    assert "machines.rollout_num_gpus is 2, the run's flags say 4" in said[2]
    assert len(said) == 3


async def test_encoders_start_first_and_every_port_is_another():
    groups = [GroupSpec(worker_type=kind, num_gpus=2) for kind in ("decode", "prefill", "placeholder", "encoder")]
    layout = layout_of(*groups)
    (model,) = layout.models
    first, then = start_order(model)
    assert {engine.worker_type for engine in first} == {WorkerType.ENCODER}
    assert {engine.worker_type for engine in then} == {WorkerType.PREFILL, WorkerType.DECODE}
    lease = PortLease()
    host = LocalHost(lease)
    taken = [await take_ports(plan, model, host.take_port) for plan in model.engines]
    lease.close()
    numbers = [n for one in taken for n in (one.http, one.group, one.bootstrap, one.encoders) if n is not None]
    assert len(numbers) == len(set(numbers)) == 6 * 2 + 2 + 2


def test_prefill_apart_needs_accelerators_for_its_transfer_engine():
    layout = layout_of(*(GroupSpec(worker_type=kind, num_gpus=1) for kind in ("prefill", "decode")))
    assert transfer_problem(layout, exclusive_devices=True, accelerator="x") is None
    assert "transfer engine moves memory of accelerators, which cpu is not" in str(
        transfer_problem(layout, exclusive_devices=False, accelerator="cpu")
    )
    assert transfer_problem(layout_of(GroupSpec(num_gpus=1)), exclusive_devices=False, accelerator="cpu") is None


@pytest.mark.parametrize("name", ["disaggregation-mode", "encoder_urls", "base_gpu_id", "--port"])
def test_what_the_layout_decides_is_no_override(name):
    with pytest.raises(InputError, match="follows from the layout"):
        checked_overrides({name.removeprefix("--"): 1}, "overrides of group 0")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_example(tmp_path_factory.mktemp("example"), 0).hf_checkpoint


def opened(layout, model_dir, log_dir, **sglang):
    return open_servers(
        RolloutConfig(),
        SGLangConfig(sglang_log_dir=str(log_dir), sglang_python=__file__, **sglang),
        layout,
        select_accelerator("cpu"),
        model_dir=model_dir,
        dtype=torch.float32,
        max_context_len=64,
        load_weights=False,
        seed=0,
        threads=1,
        trust_remote_code=False,
    )


def test_several_models_are_one_engine_and_a_routers_address_is_the_trained_models(model_dir, tmp_path):
    models = (
        ModelSpec(name="judge", model_path=str(model_dir), server_groups=(GroupSpec(num_gpus=1),)),
        ModelSpec(name="actor", server_groups=(GroupSpec(num_gpus=1),)),
    )
    engine = opened(plan_layout(Description(models=models)), model_dir, tmp_path, sglang_router_port=7777)
    assert isinstance(engine, SGLangModels)
    judge, actor = engine._engines
    assert engine._updated == (actor,)
    assert (judge._config.sglang_router_port, actor._config.sglang_router_port) == (None, 7777)
    assert judge._layout.models[0].name == "judge"


def test_a_model_path_without_a_model_is_refused_with_the_models_name(tmp_path):
    models = (
        ModelSpec(name="actor", server_groups=(GroupSpec(num_gpus=1),)),
        ModelSpec(name="judge", model_path=str(tmp_path / "none"), server_groups=(GroupSpec(num_gpus=1),)),
    )
    with pytest.raises(InputError, match=r"model judge: .*none/config\.json: cannot be read"):
        check_described_models(plan_layout(Description(models=models)), trust_remote_code=False)


def test_a_layout_that_the_cpu_cannot_run_is_refused_when_its_engine_is_made(model_dir, tmp_path):
    layout = layout_of(*(GroupSpec(worker_type=kind, num_gpus=1) for kind in ("prefill", "decode")))
    with pytest.raises(InputError, match="prefill and decode are apart"):
        opened(layout, model_dir, tmp_path)


class StandInServer:
    """What an adopted server says of itself."""

    name, tensor_parallel_size = "--rollout-external-engine-addrs h:1", 1

    def __init__(self, model_dir, mask_tokens):
        self._described = json.loads((model_dir / "config.json").read_text())
        self._mask_tokens = mask_tokens

    async def model_info(self):
        return self._described | {"model_path": "theirs"}

    async def server_info(self):
        return {"context_length": 64, "sampling_mask_max_tokens": self._mask_tokens}


async def test_an_adopted_server_that_cannot_tell_which_tokens_were_kept_is_refused_where_they_are_needed(model_dir):
    settings = ServerSettings(model_dir, torch.float32, 64, 8, None, False, 0, 1, 2000)
    await check_adopted(StandInServer(model_dir, None), settings, 1)
    filtered = replace(settings, needs_kept_ids=True)
    await check_adopted(StandInServer(model_dir, 1024), filtered, 1)
    for there in (None, 100):
        with pytest.raises(InputError, match="start it with --sampling-mask-max-tokens 1024, or leave both out"):
            await check_adopted(StandInServer(model_dir, there), filtered, 1)


def test_an_engine_of_prefill_and_decode_apart_does_not_claim_to_return_kept_ids(model_dir, tmp_path):
    groups = (GroupSpec(worker_type=kind, num_gpus=1) for kind in ("prefill", "decode"))
    settings = ServerSettings(model_dir, torch.float32, 64, 8, None, False, 0, 1, 2000)
    engine = SGLangEngine(
        layout_of(*groups), settings, SGLangConfig(), select_accelerator("cpu"), python=tmp_path, log_dir=tmp_path
    )
    assert not engine.capabilities.returns_kept_token_ids


def test_encoders_keep_the_weights_that_they_were_started_with():
    layout = layout_of(GroupSpec(num_gpus=1), GroupSpec(worker_type=WorkerType.ENCODER, num_gpus=1))
    assert [engine.updates_weights for engine in layout.engines] == [True, False]
