"""torch.distributed backend strings ("nccl", "cpu:gloo,musa:mccl"), parsed instead of searched for substrings.

CUDA-hard-coded code and users write ``nccl`` and ``cuda``; both mean the selected accelerator here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from accel.backends.names import ANY_BACKEND, ANY_DEVICE
from accel.contract import Accelerator
from accel.errors import AcceleratorError
from accel.registry import get_accelerator

HOST_DEVICE = "cpu"
HOST_BACKEND = "gloo"
OPTIONAL_BACKENDS: dict[str, Callable[[], bool]] = {  # listed by every torch, and built into some
    "gloo": dist.is_gloo_available,
    "nccl": dist.is_nccl_available,
    "xccl": dist.is_xccl_available,
    "mpi": dist.is_mpi_available,
    "ucc": dist.is_ucc_available,
    "fake": lambda: False,  # torch lists it; it moves nothing
}
_inside: dict[str, str] = {}  # of a registered backend that only carries another's calls: the other's string
_WORD = re.compile(r"[a-z0-9_-]+")


@dataclass(frozen=True)
class BackendSpec:
    """A parsed backend string: one bare backend, or one backend per device type in the order given."""

    bare: str | None
    by_device: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> BackendSpec:
        """Parse one string; spaces and upper case are accepted, anything malformed is an AcceleratorError."""
        parts = [part.strip().lower() for part in text.split(",")]
        if len(parts) == 1 and ":" not in parts[0]:
            return cls(bare=_word(parts[0], text))
        pairs: dict[str, str] = {}
        for part in parts:
            device, colon, backend = (piece.strip() for piece in part.partition(":"))
            if not colon:
                raise _malformed(text, f"{part!r} has no device before it")
            if _word(device, text) in pairs:
                raise _malformed(text, f"the device {device!r} is named twice")
            pairs[device] = _word(backend, text)
        return cls(bare=None, by_device=tuple(pairs.items()))

    def __str__(self) -> str:
        return self.bare or ",".join(f"{device}:{backend}" for device, backend in self.by_device)

    def backends(self) -> tuple[str, ...]:
        """The backends named, in order."""
        return (self.bare,) if self.bare else tuple(backend for _, backend in self.by_device)

    def for_device(self, device_type: str) -> str | None:
        """The backend that serves a device type; a bare one serves all."""
        return self.bare or dict(self.by_device).get(device_type)


def normalize_backend(text: str | None, accelerator: Accelerator | None = None) -> str:
    """The string to give to torch for what a user or a library asked.

    None, "" and "auto" are the accelerator's own; ``nccl`` and ``cuda:nccl`` are translated to it; a composite string
    that leaves out the host or the device is completed; an unknown backend or another vendor's device is an
    AcceleratorError.
    """
    accelerator = accelerator or get_accelerator()
    if text is None or text.strip().lower() in ("", "auto"):
        text = accelerator.train_backend
    spec = BackendSpec.parse(text)
    own = device_backend(accelerator)
    if spec.bare:
        return _translated(spec.bare, own, text)
    pairs: dict[str, str] = {}
    for device, backend in spec.by_device:
        target = accelerator.device_type if device == ANY_DEVICE else device
        if target not in (HOST_DEVICE, accelerator.device_type):
            raise AcceleratorError(
                f"the backend string {text!r} names the device {device!r}, this job runs on {accelerator.name!r}: use "
                f"{HOST_DEVICE!r}, {accelerator.device_type!r}, or leave the device out"
            )
        carrier = _for_device(target, _translated(backend, own, text), accelerator, text)
        if pairs.setdefault(target, carrier) != carrier:
            raise AcceleratorError(
                f"the backend string {text!r} gives the device {target!r} two backends, {pairs[target]} and {carrier} "
                f"({ANY_DEVICE} means the selected accelerator): keep one"
            )
    pairs.setdefault(HOST_DEVICE, HOST_BACKEND)
    pairs.setdefault(accelerator.device_type, own)
    ordered = sorted(pairs.items(), key=lambda pair: pair[0] != HOST_DEVICE)
    return str(BackendSpec(bare=None, by_device=tuple(ordered)))


def process_group_backend(accelerator: Accelerator | None = None) -> str:
    """What training groups are initialised with."""
    accelerator = accelerator or get_accelerator()
    return normalize_backend(accelerator.train_backend, accelerator)


def weight_update_backend(accelerator: Accelerator | None = None) -> str:
    """What the group that carries new weights to the engines is initialised with."""
    accelerator = accelerator or get_accelerator()
    return normalize_backend(accelerator.weight_update_backend, accelerator)


def is_accelerator_backend(text: str, accelerator: Accelerator | None = None) -> bool:
    """Whether a group of this backend moves the accelerator's tensors with its own collectives.

    ``nccl`` counts as the selected accelerator's, which it is translated to. Unknown words are simply not it.
    """
    accelerator = accelerator or get_accelerator()
    own = device_backend(accelerator)
    spec = BackendSpec.parse(inner_backend(text))
    if spec.bare:
        return spec.bare in (own, ANY_BACKEND)
    devices = (accelerator.device_type, ANY_DEVICE)
    return any(device in devices and backend in (own, ANY_BACKEND) for device, backend in spec.by_device)


def declare_inner_backend(name: str, inner: str) -> None:
    """Say that the registered backend ``name`` carries the calls of ``inner`` ("mccl", "cpu:gloo,musa:mccl")."""
    _inside[name] = inner


def inner_backend(text: str) -> str:
    """The backend string inside, for a backend that was declared so; any other as it is."""
    return _inside.get(text.strip().lower(), text)


def device_backend(accelerator: Accelerator) -> str:
    """The one backend that carries the device's tensors ("mccl")."""
    backend = BackendSpec.parse(accelerator.train_backend).for_device(accelerator.device_type)
    if backend is None:
        raise AcceleratorError(
            f"{accelerator.name!r} declares train_backend {accelerator.train_backend!r} without its own device"
        )
    return backend


def known_backends(own: str) -> list[str]:
    """What this build of torch has, and the accelerator's own (whose plugin may not be imported yet)."""
    listed = set(dist.Backend.backend_list) - {dist.Backend.UNDEFINED}
    missing = {backend for backend, is_built in OPTIONAL_BACKENDS.items() if backend in listed and not is_built()}
    return sorted((listed - missing) | {own})


def _translated(backend: str, own: str, text: str) -> str:
    if backend == ANY_BACKEND:
        return own
    known = known_backends(own)
    if backend not in known:
        raise AcceleratorError(f"unknown backend {backend!r} in {text!r}: known here are {', '.join(known)}")
    return backend


def _for_device(device: str, backend: str, accelerator: Accelerator, text: str) -> str:
    """``backend`` if it carries the device's tensors as far as torch, or the accelerator's declaration, tells."""
    if device == accelerator.device_type and backend == device_backend(accelerator):
        return backend
    carries = dist.Backend.backend_capability.get(backend, [accelerator.device_type])
    if device in carries:
        return backend
    fitting = HOST_BACKEND if device == HOST_DEVICE else device_backend(accelerator)
    raise AcceleratorError(
        f"the backend string {text!r} gives {device!r} the backend {backend!r}, which carries "
        f"{', '.join(carries)} tensors only: write {device}:{fitting}"
    )


def _word(word: str, text: str) -> str:
    if _WORD.fullmatch(word) is None:
        raise _malformed(text, f"{word!r} is not a name")
    return word


def _malformed(text: str, why: str) -> AcceleratorError:
    return AcceleratorError(
        f"the backend string {text!r} cannot be read: {why}. Write one backend ('nccl') or one per device "
        "('cpu:gloo,musa:mccl')"
    )
