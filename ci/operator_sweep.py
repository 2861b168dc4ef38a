"""torch's OpInfo database on the emulated MUSA device against the host: values, devices, and gradients.

    python ci/operator_sweep.py [--only SUBSTRING] [--samples N]

Every operator is right, or stands in operator_exceptions.toml with a reason, or is skipped for one that is printed.
An exception that has become right is an error too, so that the list stays short. Ends with 1 on anything unexpected.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import tomllib
import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_map

from accel import select_accelerator

EXCEPTIONS = Path(__file__).with_name("operator_exceptions.toml")
DTYPES = (torch.float32, torch.complex64, torch.int64, torch.bool)
DEVICE = "musa:0"  # a device only once the emulation is loaded
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


class Skipped(Exception):
    """There is nothing to compare with."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="operators whose name contains this")
    parser.add_argument("--samples", type=int, default=2, help="inputs of each operator (default: 2)")
    parser.add_argument("--verbose", action="store_true", help="print every operator before it runs")
    options = parser.parse_args()
    faulthandler.enable()  # a crash names its operator
    select_accelerator("musa", emulate=True)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    listed = tomllib.loads(EXCEPTIONS.read_text())
    excepted: dict[str, str] = listed["exceptions"]
    counts: Counter[str] = Counter()
    unexpected = []
    for operator in op_db:
        name = operator.name + (f".{operator.variant_test_name}" if operator.variant_test_name else "")
        if options.only not in name:
            continue
        if options.verbose:
            print(name, flush=True)
        outcome, why = judge(operator, options.samples, values=name not in listed["uninitialised"]["operators"])
        if name in excepted and outcome == "wrong":
            outcome = "excepted"
        elif name in excepted and outcome == "right":
            outcome, why = "wrong", "stands among the exceptions and is right: take it out"
        counts[outcome] += 1
        if outcome == "wrong":
            unexpected.append(name)
        if outcome != "right":
            print(f"{outcome}  {name}: {excepted[name] if outcome == 'excepted' else why}", flush=True)
    print(", ".join(f"{counts[outcome]} {outcome}" for outcome in ("right", "excepted", "skipped", "wrong")))
    return 1 if unexpected or not counts else 0


def judge(operator: Any, samples: int, *, values: bool) -> tuple[str, str]:
    """The outcome of one operator, and why where it is not right."""
    try:
        for place, sample in enumerate(islice(_samples(operator), samples)):
            compare(operator, sample, with_gradient=place == 0, values=values)
    except Skipped as reason:
        return "skipped", str(reason)
    except Exception as error:  # noqa: BLE001 - whatever the device raises is this operator's result
        return "wrong", f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    return "right", ""


def _samples(operator: Any) -> Iterator[Any]:
    dtype = next((dtype for dtype in DTYPES if dtype in operator.dtypes), None)
    if dtype is None:
        raise Skipped("has none of the types that are compared")
    torch.manual_seed(0)
    try:
        yield from operator.sample_inputs("cpu", dtype, requires_grad=dtype.is_floating_point or dtype.is_complex)
    except Exception as error:
        raise Skipped(f"has no inputs on the host: {type(error).__name__}") from error


def compare(operator: Any, sample: Any, *, with_gradient: bool, values: bool) -> None:
    """The same call on both, from the same seed: equal results on the device, equal gradients."""
    call = (sample.input, sample.args, sample.kwargs)
    differentiable = with_gradient and operator.supports_autograd
    try:
        on_host, host_gradients = _run(operator, call, differentiable, torch.device("cpu"))
    except Exception as error:
        raise Skipped(f"fails on the host: {type(error).__name__}") from error
    on_device, device_gradients = _run(operator, call, differentiable, torch.device(DEVICE))
    _same(on_device, on_host, values)
    _same(device_gradients, host_gradients, values)


def _run(operator: Any, call: Any, differentiable: bool, device: torch.device) -> tuple[Any, Any]:
    leaves: list[torch.Tensor] = []

    def move(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            moved = value.detach().clone().to(device)
            if differentiable and value.requires_grad:
                leaves.append(moved.requires_grad_())
            return moved
        return device if isinstance(value, torch.device) or value == "cpu" else value

    given, arguments, keywords = tree_map(move, call)
    torch.manual_seed(7)
    result = operator(given, *arguments, **keywords)
    wanted = [t for t in tree_flatten(result)[0] if isinstance(t, torch.Tensor) and t.requires_grad]
    if not wanted or not leaves:
        return result, []
    total = sum((t.abs() if t.is_complex() else t).sum() for t in wanted)
    return result, torch.autograd.grad(total, leaves, allow_unused=True)


def _same(on_device: Any, on_host: Any, values: bool) -> None:
    got, wanted = tree_flatten(on_device)[0], tree_flatten(on_host)[0]
    assert len(got) == len(wanted), f"{len(got)} results for {len(wanted)}"
    for value, expected in zip(got, wanted, strict=True):
        if not isinstance(expected, torch.Tensor):
            assert value == expected or value is None or expected != expected, f"{value} for {expected}"
            continue
        if expected.layout is not torch.strided:
            raise Skipped(f"gives {expected.layout}, which the device has not")
        assert str(value.device) == DEVICE, f"the result is on {value.device}"
        if not values:
            assert (value.shape, value.dtype) == (expected.shape, expected.dtype)
            continue
        torch.testing.assert_close(value.detach().cpu(), expected.detach(), equal_nan=True, **TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
