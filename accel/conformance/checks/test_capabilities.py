"""What the backend claims beyond the other subjects' checks, each claim tried on the device."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

from accel import accelerator_spec
from accel.conformance import programs
from accel.contract import Accelerator
from accel.registry import SPEC_ENV

# Relative error of a product of 128-long rows whose operands are rounded to the format first.
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
_ALLOCATE = "import accel, torch; torch.ones(1 << 20, device=accel.get_accelerator().device()).sum().item()"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_a_product_and_its_gradient(accelerator: Accelerator, needs: Callable[..., None], dtype: torch.dtype) -> None:
    needs("bf16" if dtype is torch.bfloat16 else "fp16")
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(128, 128, generator=generator).to(dtype) for _ in range(2))
    exact = a.double() @ b.double()
    there = a.to(accelerator.device()).requires_grad_()
    product = there @ b.to(accelerator.device())
    product.sum().backward()
    assert product.dtype is dtype
    assert there.grad is not None
    for value, expected in ((product, exact), (there.grad, torch.ones_like(exact) @ b.double().T)):
        error = (value.detach().cpu().double() - expected).norm() / expected.norm()
        assert error.item() < TOLERANCE[dtype]


def test_a_model_is_built_on_the_device(accelerator: Accelerator, needs: Callable[..., None]) -> None:
    needs("init_on_device")
    with accelerator.device():
        layer = nn.Linear(16, 16)
    assert layer.weight.device.type == accelerator.device_type
    assert layer.weight.std().item() > 0


def test_a_tensor_crosses_processes_by_handle(accelerator: Accelerator, needs: Callable[..., None]) -> None:
    needs("ipc")
    context = torch.multiprocessing.get_context("spawn")
    requests, answers = context.SimpleQueue(), context.SimpleQueue()
    process = context.Process(target=programs.double_by_handle, args=(accelerator_spec(accelerator), requests, answers))
    process.start()
    try:
        shared = torch.ones(1024, device=accelerator.device())
        requests.put(shared)
        assert answers.get() == "doubled"
        accelerator.synchronize()
        assert shared.sum().item() == 2048
    finally:
        requests.put(None)
        process.join(60)
        process.kill()
        accelerator.ipc_collect()


def test_segments_expand(accelerator: Accelerator, needs: Callable[..., None]) -> None:
    needs("expandable_segments")
    assert accelerator.allocator_env is not None, "expandable_segments needs an allocator_env to ask for them"
    environment = os.environ | accelerator.worker_env(threads=1)
    environment |= {SPEC_ENV: accelerator_spec(accelerator), accelerator.allocator_env: "expandable_segments:True"}
    done = subprocess.run(
        [sys.executable, "-c", _ALLOCATE], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "expandable_segments not supported" not in done.stderr
