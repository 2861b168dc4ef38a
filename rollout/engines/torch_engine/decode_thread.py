"""The thread that decodes: runs what it is told between decode steps, and steps while there is work."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import torch

from rollout.engines.torch_engine.runner import Runner, Snapshot
from rollout.engines.torch_engine.scheduler import Answer

# Runs between decode steps; what it returns runs once the snapshot shows its effect.
Order = Callable[[Runner], Callable[[], None] | None]


class DecodeThread:
    """``deliver`` gets the answers of a step, once per step; ``failed`` gets what ended the thread. Both run on it."""

    def __init__(
        self,
        build: Callable[[], Runner],
        deliver: Callable[[list[Answer]], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._build, self._deliver, self._failed = build, deliver, failed
        self._orders: deque[Order] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self.snapshot = Snapshot()
        self._thread = threading.Thread(target=self._main, name="rollout-decode", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def order(self, order: Order) -> None:
        """Have ``order`` run before the next decode step, after those given before it."""
        with self._wake:
            self._orders.append(order)
            self._wake.notify()

    def stop(self) -> None:
        """Abort all requests and end. Returns at once."""

        def abort(runner: Runner) -> None:
            self._stopping = True
            runner.abort()

        self.order(abort)

    def join(self, timeout: float) -> bool:
        """Whether the thread has ended within ``timeout`` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _main(self) -> None:
        try:
            with torch.inference_mode():
                self._run(self._build())
        except BaseException as error:  # noqa: BLE001 - whatever ends this thread has to reach those who wait for it
            self._failed(error)

    def _run(self, runner: Runner) -> None:
        while not self._stopping:
            completions = [order(runner) for order in self._take_orders(runner)]
            if runner.can_step and not self._stopping:
                runner.step()
            answers = runner.answers()
            self.snapshot = runner.snapshot()
            if answers:
                self._deliver(answers)
            for complete in completions:
                if complete is not None:
                    complete()

    def _take_orders(self, runner: Runner) -> list[Order]:
        with self._wake:
            while not self._orders and not runner.can_step:
                self._wake.wait()
            orders = list(self._orders)
            self._orders.clear()
            return orders
