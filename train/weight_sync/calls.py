"""How the driver of a run reaches the two ends of a weight channel: in its own process, or in Ray actors."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from train.weight_sync.receiving import ReceivingEnd
from train.weight_sync.sending import SendingEnd


class DirectCalls:
    """Both ends in this process: a call is done when it was begun."""

    def __init__(self, sending: SendingEnd, receiving: ReceivingEnd) -> None:
        self._sending, self._receiving = sending, receiving

    def sending(self, call: str, *arguments: Any) -> Sequence[Any]:
        return [getattr(self._sending, call)(*arguments)]

    def receiving(self, call: str, *arguments: Any) -> Any:
        return getattr(self._receiving, call)(*arguments)

    def wait(self, begun: Sequence[Any], timeout: float) -> list[Any]:  # noqa: ARG002 - nothing is left to wait for
        return list(begun)


class ActorCalls:
    """Actors with the methods ``sending`` and ``receiving``; what is begun is a reference."""

    def __init__(self, trainers: Sequence[Any], rollout: Any) -> None:
        self._trainers, self._rollout = trainers, rollout

    def sending(self, call: str, *arguments: Any) -> Sequence[Any]:
        return [trainer.sending.remote(call, *arguments) for trainer in self._trainers]

    def receiving(self, call: str, *arguments: Any) -> Any:
        return self._rollout.receiving.remote(call, *arguments)

    def wait(self, begun: Sequence[Any], timeout: float) -> list[Any]:
        import ray

        deadline = time.monotonic() + timeout
        left = list(begun)
        while left:
            done, left = ray.wait(left, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                raise TimeoutError
            ray.get(done)  # the first failure is raised while others may still wait for what failed
        results: list[Any] = ray.get(list(begun))
        return results
