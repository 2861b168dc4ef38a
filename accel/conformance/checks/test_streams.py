"""Side streams and events order work and time it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from accel.contract import Accelerator


def test_a_side_stream_is_waited_for(accelerator: Accelerator, needs: Callable[..., None]) -> None:
    needs("streams")
    source = torch.ones(256, 256, device=accelerator.device())
    accelerator.synchronize()
    side = accelerator.stream()
    with side:
        product = source @ source
    accelerator.current_stream().wait_stream(side)
    total = product.sum()
    accelerator.current_stream().synchronize()
    assert total.item() == 256**3


def test_events_time_work(accelerator: Accelerator, needs: Callable[..., None]) -> None:
    needs("streams", "events")
    begin, end = accelerator.event(timing=True), accelerator.event(timing=True)
    begin.record(accelerator.current_stream())
    torch.ones(512, 512, device=accelerator.device()).square_()
    end.record(accelerator.current_stream())
    end.synchronize()
    assert end.query()
    assert begin.elapsed_time(end) >= 0
