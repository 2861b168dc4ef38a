"""Products and autocast against float64 on the host; a training step and a checkpoint against the host's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from accel.contract import Accelerator

# Relative error of a product of 128-long rows: a few units in the last place of each format.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


def _relative_error(value: torch.Tensor, exact: torch.Tensor) -> float:
    return ((value.cpu().double() - exact).norm() / exact.norm()).item()


def _operands() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(64, 128, generator=generator), torch.randn(128, 64, generator=generator)


def test_a_product_in_fp32(accelerator: Accelerator) -> None:
    a, b = _operands()
    product = a.to(accelerator.device()) @ b.to(accelerator.device())
    assert _relative_error(product, a.double() @ b.double()) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_autocast(accelerator: Accelerator, needs: Callable[..., None], dtype: torch.dtype) -> None:
    needs("amp", "bf16" if dtype is torch.bfloat16 else "fp16")
    a, b = _operands()
    exact = a.double() @ b.double()
    with accelerator.autocast(dtype):
        product = a.to(accelerator.device()) @ b.to(accelerator.device())
    assert product.dtype is dtype
    assert _relative_error(product, exact) < TOLERANCE[dtype]
    with accelerator.autocast(dtype, enabled=False):
        assert (a.to(accelerator.device()) @ b.to(accelerator.device())).dtype is torch.float32


class _Block(nn.Module):
    """A small transformer: embedding, causal attention, gated feed-forward, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.norm = nn.RMSNorm(32)
        self.qkv = nn.Linear(32, 96, bias=False)  # a key bias has no gradient, which Adam would blow up
        self.up, self.gate, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)
        self.head = nn.Linear(32, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return self.head(x)


def _train(device: torch.device, steps: int = 3) -> tuple[list[float], dict[str, torch.Tensor]]:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = _Block()
        tokens = torch.randint(0, 64, (4, 17))
    model, tokens = model.to(device), tokens.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


def test_log_probabilities_of_bf16_logits(accelerator: Accelerator, needs: Callable[..., None]) -> None:
    """In fp32, as the trainer takes them: a softmax in bf16 is off by more than a policy moves in a step."""
    needs("bf16")
    logits = (torch.randn(8, 4096, generator=torch.Generator().manual_seed(0)) * 4).bfloat16()
    taken = logits.to(accelerator.device()).float().log_softmax(-1)
    torch.testing.assert_close(taken.cpu().double(), logits.double().log_softmax(-1), rtol=1e-5, atol=1e-5)


def test_training_steps_equal_the_hosts(accelerator: Accelerator) -> None:
    losses, weights = _train(accelerator.device())
    expected_losses, expected_weights = _train(torch.device("cpu"))
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected_weights[name], rtol=1e-3, atol=1e-5, msg=f"{name} differs")


def test_deterministic_steps_repeat_to_the_last_bit(accelerator: Accelerator, needs: Callable[..., None]) -> None:
    needs("deterministic")
    settings: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    try:
        accelerator.use_deterministic_algorithms()
        losses, weights = _train(accelerator.device())
        again, weights_again = _train(accelerator.device())
    finally:
        torch.use_deterministic_algorithms(before[0])
        settings.fill_uninitialized_memory = before[1]
    assert again == losses
    assert all(torch.equal(weights_again[name], weight) for name, weight in weights.items())


@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
def test_copies_to_the_device_and_back(accelerator: Accelerator, needs: Callable[..., None], pinned: bool) -> None:
    source = torch.randn(1 << 16)
    if pinned:
        needs("pinned_memory")
        source = source.pin_memory()
        assert source.is_pinned()
    there = source.to(accelerator.device(), non_blocking=pinned)
    back = torch.empty_like(source, pin_memory=pinned)
    back.copy_(there, non_blocking=pinned)
    accelerator.synchronize()
    assert torch.equal(back, source)


def test_a_checkpoint_crosses_devices(accelerator: Accelerator, tmp_path: Path) -> None:
    weights = {"w": torch.randn(16, 16, device=accelerator.device()), "b": torch.arange(4, device=accelerator.device())}
    path = tmp_path / "weights.pt"
    torch.save(weights, path)
    last = accelerator.device(accelerator.device_count() - 1)
    for target in (torch.device("cpu"), accelerator.device(0), last):
        loaded = torch.load(path, map_location=target, weights_only=True)
        assert all(torch.equal(loaded[name].cpu(), weights[name].cpu()) for name in weights)
        assert all(tensor.device == torch.empty(0, device=target).device for tensor in loaded.values())


def test_safetensors_open_on_the_device(accelerator: Accelerator, needs: Callable[..., None], tmp_path: Path) -> None:
    needs("safetensors_device")
    weights = {"w": torch.randn(16, 16)}
    save_file(weights, tmp_path / "w.safetensors")
    loaded = load_file(tmp_path / "w.safetensors", device=str(accelerator.device()))
    assert loaded["w"].device.type == accelerator.device_type
    assert torch.equal(loaded["w"].cpu(), weights["w"])
