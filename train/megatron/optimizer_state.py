"""The distributed optimizer's state by parameter: gathered over the data-parallel ranks, and dealt out to them again.

Megatron cuts the fp32 weights and moments of all parameters, end to end, into equal pieces for the data-parallel ranks,
so that a rank holds a range of some parameters. That layout stays in here: outside, a parameter's state has its shape.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist

from train.optim import StatelessAdam

Kind = Literal["param", "exp_avg", "exp_avg_sq"]
"""fp32 (master) weights, first and second moments."""


class ParameterState:
    """State of every parameter in this rank's part of the model; ``optimizers`` are Megatron's distributed ones.

    ``kinds`` is what there is of each parameter: no moments where the optimizer keeps none.
    """

    def __init__(self, optimizers: list[Any]) -> None:
        self._optimizers = [optimizer for optimizer in optimizers if not optimizer.is_stub_optimizer]
        stateless = all(isinstance(optimizer.optimizer, StatelessAdam) for optimizer in self._optimizers)
        self.kinds: tuple[Kind, ...] = ("param",) if stateless else ("param", "exp_avg", "exp_avg_sq")
        self._of = {
            parameter: optimizer
            for optimizer in self._optimizers
            for buffer in optimizer.buffers
            for parameter in buffer.param_index_map
        }

    def gather(self, parameter: torch.nn.Parameter, kind: Kind) -> torch.Tensor:
        """The whole state of one parameter, fp32 in its shape; zeros before the first optimizer step.

        Collective over the data-parallel ranks. Right on the first of them only, which is enough for writing.
        """
        optimizer = self._of[parameter]
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        held = self._held(parameter)
        if held is not None:
            start, stop, tensors = held
            if kind in tensors:
                whole[start:stop] = tensors[kind]
        group = optimizer.data_parallel_group
        if group.size() > 1:
            # Every element comes from one rank and is zero on the others. Added as integers, so that no bit changes.
            dist.reduce(whole.view(torch.int32), dst=dist.get_process_group_ranks(group)[0], group=group)
        return whole.view(parameter.shape)

    def is_held(self, parameter: torch.nn.Parameter) -> bool:
        """Whether this rank holds any of a parameter's state."""
        return self._held(parameter) is not None

    @torch.no_grad()
    def set(self, parameter: torch.nn.Parameter, kind: Kind, whole: torch.Tensor) -> None:
        """Keep this rank's range of a parameter's whole state. ``begin_loading`` comes before the first."""
        held = self._held(parameter)
        if held is not None:
            start, stop, tensors = held
            tensors[kind].copy_(whole.reshape(-1)[start:stop])

    def steps(self) -> int:
        """Optimizer steps taken, the same on every rank. Collective over all ranks."""
        counts = torch.tensor([self._local_steps()], dtype=torch.int64)
        if dist.get_world_size() > 1:
            device = next(iter(self._of)).device
            counts = counts.to(device)
            dist.all_reduce(counts, op=dist.ReduceOp.MAX)
        return int(counts)

    def begin_loading(self, steps: int) -> None:
        """Let every optimizer make its state as if it had taken ``steps``; weights and moments are to be set then."""
        for optimizer in self._optimizers:
            adam = optimizer.optimizer
            if not isinstance(adam, StatelessAdam):
                optimizer._init_optimizer_states_with_dummy_values()
            for group in adam.param_groups:
                if "step" in group:  # Apex, TransformerEngine and StatelessAdam count by group, torch by parameter
                    group["step"] = steps
            for state in adam.state.values():
                if "step" in state:
                    state["step"].fill_(steps)

    def _local_steps(self) -> int:
        counts = [0]
        for optimizer in self._optimizers:
            counts += [int(group["step"]) for group in optimizer.optimizer.param_groups if "step" in group]
            counts += [int(state["step"]) for state in optimizer.optimizer.state.values() if "step" in state]
        return max(counts)

    def _held(self, parameter: torch.nn.Parameter) -> tuple[int, int, dict[str, torch.Tensor]] | None:
        """The range of the flattened parameter whose state is here, and that state by kind, flat."""
        optimizer = self._of[parameter]
        if parameter not in optimizer.model_param_gbuf_map:
            return None
        part = optimizer._get_model_param_range_map(parameter)["param"]
        return part.start, part.end, optimizer._get_main_param_and_optimizer_states(parameter)
