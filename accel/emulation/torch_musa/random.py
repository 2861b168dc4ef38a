"""Random numbers: one generator a device."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch_musa.device import DeviceLike, _extension, _get_device_index, current_device, device_count

default_generators: tuple[torch.Generator, ...] = tuple(
    _extension.default_generator(index) for index in range(device_count())
)


def _generator(device: DeviceLike) -> torch.Generator:
    return default_generators[_get_device_index(device)]


def get_rng_state(device: DeviceLike = "musa") -> torch.Tensor:
    return _generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: DeviceLike = "musa") -> None:
    _generator(device).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [generator.get_state() for generator in default_generators]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    for generator, state in zip(default_generators, new_states, strict=True):
        generator.set_state(state)


def manual_seed(seed: int) -> None:
    """Of the current device; none where there is none, as a driver without a device may call it."""
    if default_generators:
        default_generators[current_device()].manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    for generator in default_generators:
        generator.manual_seed(int(seed))


def seed() -> None:
    default_generators[current_device()].seed()


def seed_all() -> None:
    manual_seed_all(default_generators[current_device()].seed())


def initial_seed() -> int:
    return default_generators[current_device()].initial_seed()
