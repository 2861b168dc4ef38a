"""Weights under their Hugging Face names, and what makes an update of them whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from samples.errors import InputError


@dataclass(frozen=True)
class Slot:
    """Where one named tensor goes: a view into a (fused) buffer, and how its rows are arranged there."""

    target: torch.Tensor
    shape: torch.Size  # of the tensor as Hugging Face has it
    arrange: Callable[[torch.Tensor], torch.Tensor] | None = None

    def copy(self, tensor: torch.Tensor) -> None:
        self.target.copy_(self._arranged(tensor))

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the target is what ``copy`` would make it, bit for bit."""
        return torch.equal(_bits(self._arranged(tensor).to(self.target)), _bits(self.target))

    def _arranged(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.arrange is None else self.arrange(tensor).view(self.target.shape)


@dataclass(frozen=True)
class WeightTable:
    """Every tensor of a model by name. ``aliases`` names tied tensors: name -> the name whose memory it shares.

    Where the slots are not the model's own memory, ``apply`` runs once all have come, and ``held`` gives what the model
    computes with under the slots' names.
    """

    slots: Mapping[str, Slot]
    aliases: Mapping[str, str]
    apply: Callable[[], None] | None = None
    held: Callable[[], Mapping[str, torch.Tensor]] | None = None

    def differing(self, tensors: Mapping[str, torch.Tensor]) -> list[str]:
        """Names of tensors that are not, bit for bit, what the model computes with."""
        slots = self.slots
        if self.held is not None:
            slots = {name: Slot(tensor, tensor.shape) for name, tensor in self.held().items()}
        return [name for name, tensor in tensors.items() if not slots[self.aliases.get(name, name)].holds(tensor)]


class WeightUpdate:
    """One replacement of all weights: which tensors came, and whether that is every one of them."""

    def __init__(self, table: WeightTable) -> None:
        self._table = table
        self._received: set[str] = set()
        self._sent_aliases: dict[str, torch.Tensor] = {}

    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy a bucket in place. Raises InputError, having copied none of it, for a wrong name or shape."""
        for name, tensor in tensors.items():
            self._check(name, tensor)
        for name, tensor in tensors.items():
            if name in self._table.aliases:
                self._sent_aliases[name] = tensor.clone()
            else:
                self._table.slots[name].copy(tensor)
                self._received.add(name)

    def keep(self, names: frozenset[str]) -> None:
        """Count tensors that are in place already as arrived."""
        held = {} if self._table.held is None else self._table.held()
        for name in names:
            target = self._table.aliases.get(name, name)
            if target not in self._table.slots:
                raise InputError(f"weight update: {name} cannot be kept, it is no tensor of this model")
            if self._table.held is not None:
                self._table.slots[target].copy(held[target])
            self._received.add(target)

    def finish(self) -> None:
        """Put a whole update to use. Raises InputError unless every tensor came, and tied ones (if sent) came equal."""
        missing = [name for name in self._table.slots if name not in self._received]
        if missing:
            shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
            raise InputError(
                f"weight update: {len(missing)} of {len(self._table.slots)} tensors did not arrive: {shown}"
            )
        for name, tensor in self._sent_aliases.items():
            source = self._table.slots[self._table.aliases[name]]
            if not torch.equal(tensor.to(source.target), source.target):
                raise InputError(
                    f"weight update: {name} differs from {self._table.aliases[name]}, but the model's config.json ties "
                    "them (tie_word_embeddings): send equal tensors, or serve a config that does not tie them"
                )
        if self._table.apply is not None:
            self._table.apply()

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        slot = self._table.slots.get(self._table.aliases.get(name, name))
        if slot is None:
            raise InputError(f"weight update: {name} is no tensor of this model (shape {list(tensor.shape)})")
        if tensor.shape != slot.shape:
            raise InputError(
                f"weight update: {name} has shape {list(tensor.shape)}, the model needs {list(slot.shape)}: "
                "send whole tensors, not shards"
            )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: NaN equals itself there, and -0.0 is not 0.0."""
    return tensor.contiguous().view(torch.uint8) if tensor.is_floating_point() and tensor.ndim else tensor
