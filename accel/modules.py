"""Moving a torch module to the selected device without losing what hangs on its parameters."""

from __future__ import annotations

from typing import TypeVar

import torch

AnyModule = TypeVar("AnyModule", bound=torch.nn.Module)


def move_module(module: AnyModule, device: torch.device) -> AnyModule:
    """``module.to(device)``, with parameters that were tied still tied and their Python attributes kept; the module.

    On the devices that torch knows by name, ``Module.to`` exchanges the memory under each parameter. On one from
    outside (MUSA, Ascend: PrivateUse1) it puts a new parameter in the place of each: tied weights then part, and marks
    such as Megatron's ``sequence_parallel``, by which gradients are summed over ranks, are gone. Nothing says so.
    """
    places = [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner._parameters.items()
        if parameter is not None
    ]
    module.to(device)
    moved: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for owner, name, before in places:
        after = owner._parameters[name]
        assert after is not None
        if after is before:
            continue
        if before not in moved:
            moved[before] = after
            vars(after).update(vars(before))
        owner._parameters[name] = moved[before]
    return module
