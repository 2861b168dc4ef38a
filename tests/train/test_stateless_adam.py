"""StatelessAdam against torch's own Adam and AdamW, made anew before every step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from train.optim import StatelessAdam

SHAPES = [(5, 3), (7,), (), (2, 2, 2)]


def parameters(dtype: torch.dtype, seed: int = 0) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in SHAPES]


def trained(make: Callable[[Any], torch.optim.Optimizer], dtype: torch.dtype, *, anew: bool, steps: int = 10) -> Any:
    """Parameters after ``steps`` with gradients of sizes from 1e-9 to 1e3; ``anew``: an optimizer for each step."""
    values = parameters(dtype)
    optimizer = make(values)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        if anew:
            optimizer = make(values)
        for value in values:
            sizes = 10.0 ** (torch.rand(value.shape, generator=generator, dtype=dtype) * 12 - 9)
            value.grad = torch.randn(value.shape, generator=generator, dtype=dtype) * sizes
        optimizer.step()
    return values


def largest_difference(ours: Any, theirs: Any) -> float:
    return max(float((a - b).detach().abs().max()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_it_equals_adam_made_anew_before_every_step(
    dtype: torch.dtype, tolerance: float, maximize: bool, weight_decay: float, adam_w_mode: bool
) -> None:
    theirs = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    same: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": weight_decay}

    def ours(values: Any) -> StatelessAdam:
        return StatelessAdam(values, **same, adam_w_mode=adam_w_mode, maximize=maximize)

    def reference(values: Any) -> torch.optim.Optimizer:
        return theirs(values, **same, maximize=maximize)

    assert largest_difference(trained(ours, dtype, anew=False), trained(reference, dtype, anew=True)) <= tolerance


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_without_bias_correction_it_equals_the_uncorrected_moments(adam_w_mode: bool) -> None:
    lr, betas, eps, decay = 0.01, (0.8, 0.95), 1e-8, 0.1

    def ours(values: Any) -> StatelessAdam:
        return StatelessAdam(values, lr, betas, eps, decay, adam_w_mode=adam_w_mode, bias_correction=False)

    got = trained(ours, torch.float64, anew=False, steps=1)
    given_values, want = parameters(torch.float64), []
    generator = torch.Generator().manual_seed(1)
    for value in given_values:
        sizes = 10.0 ** (torch.rand(value.shape, generator=generator, dtype=torch.float64) * 12 - 9)
        gradient = torch.randn(value.shape, generator=generator, dtype=torch.float64) * sizes
        gradient = gradient if adam_w_mode else gradient + decay * value.detach()
        first, second = (1 - betas[0]) * gradient, (1 - betas[1]) * gradient**2
        kept = value.detach() * (1 - lr * decay) if adam_w_mode else value.detach()
        want.append(kept - lr * first / (second.sqrt() + eps))
    assert largest_difference(got, want) <= 1e-12


@settings(max_examples=50, deadline=None)
@given(
    st.floats(-1e6, 1e6),
    st.floats(0, 10),
    st.floats(0, 0.999),
    st.floats(0, 0.999),
    st.floats(1e-12, 1.0),
    st.floats(0, 1),
)
def test_any_settings_equal_a_fresh_adamw(
    gradient: float, lr: float, beta1: float, beta2: float, eps: float, decay: float
) -> None:
    ours, theirs = (torch.nn.Parameter(torch.tensor([1.5], dtype=torch.float64)) for _ in range(2))
    ours.grad, theirs.grad = (torch.tensor([gradient], dtype=torch.float64) for _ in range(2))
    StatelessAdam([ours], lr, (beta1, beta2), eps, decay).step()
    torch.optim.AdamW([theirs], lr, (beta1, beta2), eps, decay).step()
    assert float((ours - theirs).abs()) <= 1e-12 * max(1.0, lr)


def test_no_moment_is_kept_or_saved() -> None:
    values = parameters(torch.float32)
    optimizer = StatelessAdam(values, 0.1)
    for value in values:
        value.grad = torch.ones_like(value)
    optimizer.step()
    saved = optimizer.state_dict()
    assert saved["state"] == {}
    assert len(optimizer.state) == 0
    assert not [entry for group in saved["param_groups"] for entry in group.values() if isinstance(entry, torch.Tensor)]


def test_what_is_saved_is_taken_up_again() -> None:
    values = parameters(torch.float64)
    first = StatelessAdam([{"params": values[:2], "lr": 0.3}, {"params": values[2:]}], 0.1, weight_decay=0.2)
    for value in values:
        value.grad = torch.full_like(value, 0.5)
    first.step()
    copies = [torch.nn.Parameter(value.detach().clone()) for value in values]
    second = StatelessAdam([{"params": copies[:2]}, {"params": copies[2:]}])
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert [(group["lr"], group["step"]) for group in second.param_groups] == [(0.3, 1), (0.1, 1)]
    for one, other in zip(values, copies, strict=True):
        other.grad = one.grad
    first.step()
    second.step()
    assert largest_difference(values, copies) == 0.0


def test_moving_parameters_away_and_back_between_steps_changes_nothing() -> None:
    def run(*, moves: bool) -> list[torch.nn.Parameter]:
        values = parameters(torch.float64)
        optimizer = StatelessAdam(values, 0.1, weight_decay=0.1)
        for number in range(3):
            for value in values:
                if moves:  # as an offload does: the storage goes and other storage comes back under the same parameter
                    kept = value.detach().clone()
                    value.data = torch.empty(0, dtype=torch.float64)
                    value.data = kept
                value.grad = torch.full_like(value, 0.1 * (number - 1))
            optimizer.step()
        return values

    assert largest_difference(run(moves=True), run(moves=False)) == 0.0


def test_parameters_without_gradient_and_a_closure_are_taken_as_torch_takes_them() -> None:
    values = parameters(torch.float64)
    before = [value.detach().clone() for value in values]
    values[0].grad = torch.ones_like(values[0])
    assert StatelessAdam(values, 0.1, weight_decay=0.5).step(lambda: 3.0) == 3.0
    assert torch.equal(values[1], before[1])
    assert not torch.equal(values[0], before[0])


def test_complex_parameters_are_two_real_ones() -> None:
    ours, theirs = (torch.nn.Parameter(torch.tensor([1.0 + 2.0j], dtype=torch.complex128)) for _ in range(2))
    ours.grad, theirs.grad = (torch.tensor([0.3 - 4.0j], dtype=torch.complex128) for _ in range(2))
    StatelessAdam([ours], 0.1, weight_decay=0.1).step()
    torch.optim.AdamW([theirs], 0.1, weight_decay=0.1).step()
    assert largest_difference([ours], [theirs]) <= 1e-12


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"lr": -1.0}, "lr -1.0"),
        ({"lr": float("nan")}, "lr nan"),
        ({"betas": (1.0, 0.9)}, "betas"),
        ({"eps": -1e-8}, "eps"),
        ({"weight_decay": -0.1}, "weight_decay -0.1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StatelessAdam(parameters(torch.float32), **wrong)


def test_sparse_gradients_are_refused() -> None:
    value = torch.nn.Parameter(torch.zeros(3))
    value.grad = torch.ones(3).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        StatelessAdam([value]).step()
