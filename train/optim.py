"""Optimizers of ours. Nothing here needs Megatron: they are plain ``torch.optim`` optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class StatelessAdam(torch.optim.Optimizer):
    """Adam or AdamW as if it were made anew before every step, so that no moment is kept and none is saved.

    After one step from zero moments (Kingma and Ba, arXiv 1412.6980, algorithm 1, t = 1) the corrected moments are g
    and g^2 whatever the betas: the update is ``-lr g / (|g| + eps)``, a soft sign of the gradient. Without
    ``bias_correction`` it is ``-lr (1 - beta1) g / (sqrt(1 - beta2) |g| + eps)``. It equals a fresh
    ``torch.optim.Adam`` to rounding as long as g^2 neither under- nor overflows; here no square is taken.

    ``weight_decay`` is decoupled with ``adam_w_mode`` (arXiv 1711.05101), else it is added to the gradient;
    ``maximize`` steps along the gradient. The memory beside parameters and gradients is that of one parameter during
    ``step``. ``state`` holds no tensor; the steps taken are counted, as a plain number, in each parameter group.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adam_w_mode: bool = True,
        bias_correction: bool = True,
        maximize: bool = False,
    ) -> None:
        if not 0.0 <= float(lr) < float("inf"):
            raise ValueError(f"lr {lr}: expected a number >= 0")
        if not (0.0 <= betas[0] < 1.0 and 0.0 <= betas[1] < 1.0):
            raise ValueError(f"betas {betas}: expected two numbers >= 0 and < 1")
        if not eps >= 0.0:
            raise ValueError(f"eps {eps}: expected a number >= 0")
        if not weight_decay >= 0.0:
            raise ValueError(f"weight_decay {weight_decay}: expected a number >= 0")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "adam_w_mode": adam_w_mode,
            "bias_correction": bias_correction,
            "maximize": maximize,
            "step": 0,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; parameters without a gradient stay as they are. Returns what ``closure`` does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _update(parameter, parameter.grad, group)
        return loss


def _update(parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
    if gradient.is_sparse:
        raise RuntimeError("StatelessAdam takes no sparse gradients")
    if torch.is_complex(parameter):  # as two real numbers, which is how torch's Adam takes them
        parameter, gradient = torch.view_as_real(parameter), torch.view_as_real(gradient)
    rate, decay = float(group["lr"]), group["weight_decay"]
    first = second = 1.0
    if not group["bias_correction"]:
        beta1, beta2 = group["betas"]
        first, second = 1 - beta1, (1 - beta2) ** 0.5
    if group["maximize"]:
        gradient = -gradient
    if decay and group["adam_w_mode"]:
        parameter.mul_(1 - rate * decay)
    elif decay:
        gradient = gradient.add(parameter, alpha=decay)
    size = gradient.abs()
    if second != 1.0:
        size.mul_(second)
    parameter.addcdiv_(gradient, size.add_(group["eps"]), value=-rate * first)
