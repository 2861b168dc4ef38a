"""A model whose experts' tokens go through DeepEP gets its buffers guarded before the first of them is made."""

import sys

import pytest

from accel.errors import AcceleratorError
from tests.accel.memory_saver_cases import deep_ep_package
from tests.train.model_cases import tiny_config
from train.config.run import RunConfig
from train.megatron import model

DISPATCHERS = [("flex", "deepep", True), ("flex", "hybridep", False), ("alltoall", "deepep", False)]


@pytest.fixture
def deep_ep_config(one_rank, monkeypatch):
    """The config of a tiny model, as if it had experts and one of these dispatchers."""
    hf_config = tiny_config("qwen3")
    config = model.transformer_config(hf_config, RunConfig())

    def with_dispatcher(dispatcher, backend="deepep"):
        config.moe_token_dispatcher_type, config.moe_flex_dispatcher_backend = dispatcher, backend
        return config

    monkeypatch.setattr(model, "transformer_config", lambda *_: with_dispatcher("flex"))
    return hf_config, config, with_dispatcher


@pytest.mark.parametrize(("dispatcher", "backend", "expected"), DISPATCHERS)
def test_only_a_mixture_of_experts_on_that_dispatcher_needs_it(deep_ep_config, dispatcher, backend, expected):
    _, config, with_dispatcher = deep_ep_config
    with_dispatcher(dispatcher, backend)
    assert not model.dispatches_with_deep_ep(config)
    config.num_moe_experts = 4
    assert model.dispatches_with_deep_ep(config) is expected


def test_building_the_model_installs_the_guard_or_says_what_is_missing(deep_ep_config, monkeypatch):
    hf_config, config, _ = deep_ep_config
    config.num_moe_experts = 4
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    with pytest.raises(AcceleratorError, match="deep_ep cannot be imported"):
        model.build_model(hf_config, RunConfig())
    package = deep_ep_package(lambda self: None)
    original = package.Buffer.__init__
    monkeypatch.setitem(sys.modules, "deep_ep", package)
    config.num_moe_experts, dense = None, config.num_moe_experts
    model.build_model(hf_config, RunConfig())
    assert package.Buffer.__init__ is original
    monkeypatch.setattr(model, "dispatches_with_deep_ep", lambda _: dense is not None)
    model.build_model(hf_config, RunConfig())
    assert package.Buffer.__init__.__wrapped__ is original
