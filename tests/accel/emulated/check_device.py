"""Run by test_emulation.py in a process of its own: the emulated device in its synchronous form, two devices."""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from accel import select_accelerator
from accel.modules import move_module

accelerator = select_accelerator("musa", emulate=True)
M0, M1 = torch.device("musa:0"), torch.device("musa:1")


def test_tensors_say_where_they_are():
    tensor = torch.ones(2, device="musa")
    assert tensor.device == M0
    assert tensor.is_musa
    assert tensor.cpu().musa().device == M0
    assert "device='musa:0'" in repr(tensor)


def test_a_view_writes_to_its_base_and_inplace_returns_the_tensor_itself():
    base = torch.zeros(4, 4, device=M0)
    row = base[1]
    assert row.add_(1) is row
    assert base.sum().item() == 4
    transposed = base.t()
    transposed[2, 1] = 5
    assert base[1, 2].item() == 5
    assert transposed.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()


def test_overlapping_writes_are_refused_as_on_the_host():
    tensor = torch.arange(4.0, device=M0)
    with pytest.raises(RuntimeError, match=r"overlap|same memory|single memory"):
        torch.add(tensor[:3], 1, out=tensor[1:])


def test_out_resizes_and_set_shares():
    out = torch.empty(0, device=M0)
    torch.add(torch.ones(3, device=M0), 1, out=out)
    assert out.tolist() == [2, 2, 2]
    shared = torch.empty(0, device=M0)
    shared.set_(out.untyped_storage(), 0, (1, 2), (2, 1))
    shared.zero_()
    assert out.tolist() == [0, 0, 2]
    grown = torch.ones(2, device=M0)
    before = torch.musa.memory_allocated(0)
    grown.resize_(1 << 16)
    assert torch.musa.memory_allocated(0) - before >= (1 << 18) - 8
    out.untyped_storage().resize_(0)
    assert out.untyped_storage().size() == 0


@pytest.mark.parametrize("op", ["matmul", "mul", "add", "clone", "imag", "vdot"])
def test_lazy_conjugation_is_not_lost(op):
    host = torch.randn(3, 3, dtype=torch.complex64)
    device = host.to(M0)
    run = {
        "matmul": lambda x: x.conj() @ x,
        "mul": lambda x: x.conj() * 2,
        "add": lambda x: x.conj().add_(1),
        "clone": lambda x: x.conj().clone(),
        "imag": lambda x: x.conj().imag + 0.0,  # a lazy negation
        "vdot": lambda x: torch.vdot(x[0].conj(), x[1]),
    }[op]
    torch.testing.assert_close(run(device).cpu(), run(host.clone()))


def test_a_conjugated_view_keeps_its_bit_both_ways():
    host = torch.randn(3, dtype=torch.complex64)
    conjugated = host.to(M0).conj()
    assert conjugated.is_conj()
    assert torch.equal(conjugated.cpu(), host.conj().resolve_conj())
    assert torch.equal(conjugated.conj().cpu(), host)


def test_gradients_through_views_and_devices():
    host = torch.randn(4, 6, requires_grad=True)
    device = host.detach().to(M0).requires_grad_()
    for x in (host, device):
        y = F.gelu(x).view(2, 12).transpose(0, 1)[3:7].softmax(-1) * torch.arange(2, device=x.device)
        y.to(M1).sum().backward()
    assert device.grad.device == M0
    torch.testing.assert_close(device.grad.cpu(), host.grad)


def test_devices_are_not_mixed():
    with pytest.raises(RuntimeError, match=r"same device.*cpu"):
        torch.ones(3, device=M0) + torch.ones(3)
    with pytest.raises(RuntimeError, match=r"same device.*another musa device"):
        torch.ones(3, device=M0) + torch.ones(3, device=M1)
    with pytest.raises(TypeError, match="host memory"):
        torch.ones(3, device=M0).numpy()
    with pytest.raises(RuntimeError, match="invalid device ordinal 7"):
        torch.ones(3, device="musa:7")
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(3, device=M0, generator=torch.Generator())
    assert (torch.ones(3, device=M0) + torch.tensor(1.0)).tolist() == [2, 2, 2]  # numbers may come from the host


def test_sparse_results_are_refused():
    with pytest.raises(RuntimeError, match="dense tensors only"):
        torch.eye(3, device=M0).to_sparse()


def test_each_device_draws_for_itself():
    torch.manual_seed(0)
    first, host = torch.randn(4, device=M0), torch.get_rng_state()
    torch.rand(3, device=M1)
    F.dropout(torch.ones(8, device=M0), 0.5, True)
    assert torch.equal(torch.get_rng_state(), host)
    torch.manual_seed(0)
    assert torch.equal(torch.randn(4, device=M0), first)
    generator = torch.Generator(device=M1).manual_seed(5)
    drawn = torch.randint(0, 100, (5,), generator=generator, device=M1)
    assert torch.equal(torch.randint(0, 100, (5,), generator=generator.manual_seed(5), device=M1), drawn)
    with torch.random.fork_rng(devices=[0], device_type="musa"):
        inside = torch.rand(2, device=M0)
    assert torch.equal(torch.rand(2, device=M0), inside)


def test_memory_is_counted_and_runs_out():
    import torch_musa

    before = torch.musa.memory_allocated(M0)
    tensor = torch.empty(1 << 20, dtype=torch.uint8, device=M0)
    made_by_a_kernel = tensor + 1
    assert torch.musa.memory_allocated(M0) - before == 2 << 20
    del tensor, made_by_a_kernel
    assert torch.musa.memory_allocated(M0) == before
    extension = sys.modules["_accelrl_musa"]
    capacity = extension.capacity()
    extension.set_capacity(before + 1000)
    try:
        with pytest.raises(torch_musa.OutOfMemoryError, match="MUSA out of memory"):
            torch.empty(1 << 20, device=M0)
    finally:
        extension.set_capacity(capacity)
    assert torch.musa.memory_stats()["num_ooms"] >= 1
    assert torch.musa.mem_get_info(0)[1] == capacity


def test_saving_loading_and_copying():
    state = {"w": torch.randn(5, device=M1), "p": torch.nn.Parameter(torch.ones(2, device=M0))}
    buffer = io.BytesIO()
    torch.save(state, buffer)
    for where, expected in ((None, M1), ("cpu", torch.device("cpu")), ("musa:0", M0)):
        buffer.seek(0)
        loaded = torch.load(buffer, map_location=where)
        assert loaded["w"].device == expected
        assert torch.equal(loaded["w"].cpu(), state["w"].cpu())
    assert copy.deepcopy(state["p"]).device == M0


def test_a_module_moves_with_its_ties_and_the_marks_on_its_parameters():
    """torch's own Module.to makes new parameters for a device from outside it."""
    module = torch.nn.ModuleDict({"embed": torch.nn.Embedding(4, 3), "head": torch.nn.Linear(3, 4, bias=False)})
    module["head"].weight = module["embed"].weight
    module["embed"].weight.sequence_parallel = True
    assert move_module(module, M1) is module
    assert module["head"].weight is module["embed"].weight
    assert module["head"].weight.sequence_parallel
    assert module["head"].weight.device == M1
    kept = module["head"].weight
    assert move_module(module, M1)["embed"].weight is kept


def test_pinned_memory_is_known_as_such():
    pinned = torch.randn(8).pin_memory()
    assert pinned.is_pinned()
    assert pinned[3:].is_pinned()
    assert not torch.randn(3).is_pinned()
    assert torch.empty(4, pin_memory=True).is_pinned()


def test_torch_accelerator_is_this_one():
    assert torch.accelerator.current_accelerator().type == "musa"
    assert torch.accelerator.device_count() == 2
    with torch.musa.device(1):
        assert torch.accelerator.current_device_index() == 1
        assert torch.empty(1, device="musa").device == M1
    assert torch.musa.current_device() == 0
    torch.musa.set_device(-1)  # left out, as torch_musa does
    assert torch.musa.current_device() == 0


def test_autocast_and_gradient_scaling():
    layer = torch.nn.Linear(4, 4).to(M0)
    with torch.autocast("musa", dtype=torch.bfloat16):
        product = layer(torch.ones(2, 4, device=M0))
        assert product.dtype == torch.bfloat16
        assert product.softmax(-1).dtype == torch.float32
    scaler, optimizer = torch.amp.GradScaler("musa"), torch.optim.SGD(layer.parameters(), 0.1)
    scaler.scale(layer(torch.ones(2, 4, device=M0)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("kind", ["plain", "foreach", "fused"])
def test_optimizers_equal_the_hosts(kind):
    torch.manual_seed(0)
    host = torch.nn.Linear(8, 8)
    device = copy.deepcopy(host).to(M0)
    for module in (host, device):
        options = {"foreach": {"foreach": True}, "fused": {"fused": True}, "plain": {"foreach": False}}[kind]
        optimizer = torch.optim.AdamW(module.parameters(), 1e-2, **options)
        for _ in range(5):
            optimizer.zero_grad()
            module(torch.arange(16.0, device=module.weight.device).view(2, 8)).pow(2).mean().backward()
            optimizer.step()
    torch.testing.assert_close(device.weight.cpu(), host.weight)


def test_convolution_equals_the_hosts():
    image = torch.randn(2, 3, 8, 8)
    layer = torch.nn.Conv2d(3, 4, 3)
    torch.testing.assert_close(layer.to(M0)(image.to(M0)).cpu(), layer.to("cpu")(image))


@pytest.mark.parametrize("kind", ["causal", "masked", "biased", "grouped"])
def test_attention_equals_the_hosts_to_the_bit(kind):
    query, key, value = torch.randn(2, 4, 6, 8), torch.randn(2, 4, 6, 8), torch.randn(2, 4, 6, 8)
    keep, bias = torch.rand(6, 6) > 0.3, torch.randn(6, 6)
    results = []
    for to in ("cpu", "musa:0"):
        given = [x.detach().to(to).requires_grad_() for x in (query, key, value)]
        options = {
            "causal": {"is_causal": True},
            "masked": {"attn_mask": keep.to(to)},
            "biased": {"attn_mask": bias.to(to)},
            "grouped": {"is_causal": True, "enable_gqa": True},
        }[kind]
        inputs = [given[0], *(x[:, :2] for x in given[1:])] if kind == "grouped" else given
        output = F.scaled_dot_product_attention(*inputs, **options)
        output.pow(2).sum().backward()
        results.append([x.detach().cpu() for x in (output, *(leaf.grad for leaf in given))])
    assert all(torch.equal(host, device) for host, device in zip(*results, strict=True))


def test_integers_are_counted_as_hardware_does():
    counts = torch.histc(torch.tensor([0, 2, 2, 3], dtype=torch.int32, device=M0), bins=4, min=0, max=3)
    assert counts.tolist() == [1, 0, 2, 1]
    assert counts.dtype == torch.int32
    floats = torch.rand(50)
    assert torch.equal(torch.histc(floats.to(M0), bins=5).cpu(), torch.histc(floats, bins=5))


def test_a_forked_child_is_refused_and_told_to_spawn():
    torch.ones(1, device=M0)
    child = os.fork()
    if child == 0:
        try:
            torch.ones(1, device=M0)
        except RuntimeError as error:
            os._exit(0 if "spawn" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_events_do_not_cross_processes():
    assert not accelerator.capabilities.ipc
    with pytest.raises(RuntimeError, match="no IPC"):
        torch.musa.Event(interprocess=True)


def test_a_worker_adopts_the_emulation():
    from accel.placement.requests import ray_worker_env

    environment = os.environ | ray_worker_env(accelerator, threads=1, devices=["1"])
    code = (
        "from accel import get_accelerator as g; a = g(); import torch; "
        "print(a.emulated, a.device_count(), torch.ones(2, device=a.device()).sum().item())"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "1", "2.0"]
