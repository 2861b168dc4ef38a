"""The host's stand-in for ``torch.cuda``: the same names and arguments, on the host's clock and generator."""

import inspect
from types import FunctionType

import pytest
import torch

from accel.backends import cpu_namespace
from accel.retarget.errors import MissingDeviceAttribute
from accel.retarget.namespace import DeviceNamespace

PUBLIC = sorted(name for name in vars(cpu_namespace) if not name.startswith("_") and name != "annotations")
FUNCTIONS = [name for name in PUBLIC if isinstance(getattr(cpu_namespace, name), FunctionType)]


def test_every_name_is_one_of_torch_cuda() -> None:
    assert [name for name in PUBLIC if not hasattr(torch.cuda, name)] == []
    for group in ("random", "amp", "nvtx"):
        names = vars(getattr(cpu_namespace, group))
        assert [name for name in names if not hasattr(getattr(torch.cuda, group), name)] == []


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_are_those_of_torch_cuda(name: str) -> None:
    theirs = inspect.signature(getattr(torch.cuda, name)).parameters
    ours = inspect.signature(getattr(cpu_namespace, name)).parameters
    required = [key for key, value in theirs.items() if value.default is inspect.Parameter.empty]
    assert [key for key, value in ours.items() if value.default is inspect.Parameter.empty] == required
    assert list(ours) == list(theirs)[: len(ours)]


def test_random_numbers_come_from_the_host_generator() -> None:
    before = cpu_namespace.get_rng_state()
    cpu_namespace.manual_seed(5)
    first = torch.rand(3)
    assert torch.equal(first, torch.rand(3, generator=torch.Generator().manual_seed(5)))
    assert cpu_namespace.initial_seed() == 5
    cpu_namespace.random.set_rng_state(before, device=cpu_namespace.current_device())
    assert torch.equal(cpu_namespace.default_generators[cpu_namespace.current_device()].get_state(), before)


def test_device_can_be_handed_to_torch_where_cuda_code_hands_a_number() -> None:
    assert torch.zeros(1, device=cpu_namespace.current_device()).device.type == "cpu"


def test_streams_and_events_order_nothing_and_tell_the_time() -> None:
    start, end = cpu_namespace.Event(enable_timing=True), cpu_namespace.Event(enable_timing=True)
    side = cpu_namespace.Stream(device="cpu", priority=-1)
    with cpu_namespace.stream(side), cpu_namespace.device(0):
        start.record()
        side.wait_stream(cpu_namespace.current_stream())
        torch.ones(64, 64) @ torch.ones(64, 64)
        end.record(side)
    side.record_event().synchronize()
    assert end.query()
    assert start.elapsed_time(end) > 0


def test_autocast_is_the_hosts() -> None:
    with cpu_namespace.amp.autocast(dtype=torch.bfloat16):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["CUDAGraph", "MemPool", "get_device_properties", "memory_stats", "ipc_collect"])
def test_what_a_processor_does_not_have_is_an_error_that_names_it(name: str) -> None:
    namespace = DeviceNamespace("cpu", cpu_namespace)
    assert not hasattr(namespace, name)
    with pytest.raises(MissingDeviceAttribute, match=f"test_retarget_cpu_namespace line .*torch.cuda.{name}"):
        getattr(namespace, name)
