"""Random numbers repeat by seed and by state, and the device's leave the host's alone."""

from __future__ import annotations

from collections.abc import Callable

import torch

from accel.contract import Accelerator


def _draw(accelerator: Accelerator, index: int = 0) -> torch.Tensor:
    return torch.rand(16, device=accelerator.device(index)).cpu()


def test_a_seed_repeats(accelerator: Accelerator) -> None:
    accelerator.manual_seed(7)
    first = _draw(accelerator)
    accelerator.manual_seed(7)
    assert torch.equal(_draw(accelerator), first)
    assert not torch.equal(_draw(accelerator), first)


def test_every_seed_is_another(accelerator: Accelerator) -> None:
    drawn = []
    for seed in (0, 1, 2, 7, 9, 1 << 16, 1 << 31, (1 << 31) + 1):
        accelerator.manual_seed(seed)
        drawn.append(tuple(_draw(accelerator).tolist()))
    assert len(set(drawn)) == len(drawn)


def test_a_state_is_restored(accelerator: Accelerator) -> None:
    state = accelerator.rng_state(0)
    assert (state.device.type, state.dtype) == ("cpu", torch.uint8)
    first = _draw(accelerator)
    accelerator.set_rng_state(state, 0)
    assert torch.equal(_draw(accelerator), first)


def test_device_draws_leave_the_host_alone(accelerator: Accelerator, needs: Callable[..., None]) -> None:
    needs("own_generator")
    before = torch.default_generator.get_state()
    accelerator.manual_seed(3)
    _draw(accelerator)
    assert torch.equal(torch.default_generator.get_state(), before)


def test_devices_draw_independently(accelerator: Accelerator, needs: Callable[..., None]) -> None:
    needs("own_generator")
    accelerator.manual_seed(5)
    last = accelerator.device_count() - 1
    expected = _draw(accelerator, last)
    accelerator.manual_seed(5)
    if last:
        _draw(accelerator, 0)
    assert torch.equal(_draw(accelerator, last), expected)
