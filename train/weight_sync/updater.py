"""One update of all weights, as the driver of a run conducts it: whole everywhere, or an error and no answers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from samples.errors import InputError, RunError
from train.weight_sync.plan import Offer, Summary, UpdatePlan

_GIVE_UP = 10.0  # seconds for telling the ends of an update that failed


class Calls(Protocol):
    """Reaches the two ends, wherever they are."""

    def sending(self, call: str, *arguments: Any) -> Sequence[Any]:
        """Begin a call of every trainer rank's ``SendingEnd``; what ``wait`` takes, the first rank's first."""
        ...

    def receiving(self, call: str, *arguments: Any) -> Any:
        """Begin a call of the rollout worker's ``ReceivingEnd``."""
        ...

    def wait(self, begun: Sequence[Any], timeout: float) -> list[Any]:
        """Results in order. Raises the first failure as soon as there is one, TimeoutError when time is up."""
        ...


class WeightUpdater:
    """``open`` comes first. ``check_equal``: compare what the engine holds with the trainer's after each update.

    ``note`` is told of updates that failed and are tried again.
    """

    def __init__(self, calls: Calls, *, check_equal: bool, note: Callable[[str], None] = lambda _: None) -> None:
        self._calls, self._check_equal, self._note = calls, check_equal, note
        self._plan: UpdatePlan | None = None
        self._retried = 0
        self._broke_off = False  # the last update; the channel may be in the middle of something

    @property
    def plan(self) -> UpdatePlan:
        if self._plan is None:
            raise RuntimeError("the weight updater is not open")
        return self._plan

    def open(self, plan: UpdatePlan) -> None:
        """Open the channel at both ends; closes one that was open."""
        self._plan = plan
        offer: Offer | None = self._wait("open", *self._calls.sending("open", plan))[0]
        self._wait("open", *self._calls.sending("connect"), self._calls.receiving("open", plan, offer))
        self._broke_off = False

    def update(self, version: int) -> dict[str, float]:
        """Make ``version`` what the engine answers from. Metrics: bytes that travelled, and tries since the start that
        failed and were made again.

        One that fails is made again with everything, ``--weight-update-retries`` times, if both ends are still there.
        Raises what went wrong at either end, in its own words; RunError when ``--weight-update-timeout`` is over. The
        engine then answers nothing until an update has succeeded.
        """
        summary = self._whole(version)
        if self._check_equal:
            try:
                self._compare(version)
            except BaseException as error:
                self._give_up(version, error)
                raise
        return {
            "perf/update_weights_bytes": float(summary.nbytes),
            "perf/update_weights_retries": float(self._retried),
        }

    def _whole(self, version: int) -> Summary:
        if self._broke_off:
            self.open(self.plan)
        left = self.plan.retries
        while True:
            try:
                return self._send(version)
            except BaseException as error:
                ready = self._give_up(version, error)
                again = left and isinstance(error, Exception) and not isinstance(error, InputError)
                if not ready or not again or not self._reopened():
                    raise
                left -= 1
                self._retried += 1
                self._note(
                    f"WARNING: the update to weight version {version} failed ({error}); everything is sent once more "
                    f"(--weight-update-retries {self.plan.retries})"
                )

    def _reopened(self) -> bool:
        """Whether the channel is there again: what failed may have broken it."""
        try:
            self.open(self.plan)
        except Exception as error:  # noqa: BLE001 - what broke the update is what is raised
            self._note(f"WARNING: the weight channel could not be opened again: {error}")
            return False
        return True

    def _send(self, version: int) -> Summary:
        held = self._wait("held", self._calls.receiving("held"))[0] if self.plan.channel == "disk_delta" else None
        self._wait("begin", *self._calls.sending("begin", version, held))
        if self.plan.at_once:
            summary = self._write()
            self._wait("pull", self._calls.receiving("pull", summary))
            return summary
        self._wait("begin", self._calls.receiving("begin", version))
        self._pass_on("take", version)
        summary = self._wait("finish", *self._calls.sending("finish"))[0]
        self._wait("commit", self._calls.receiving("commit", summary))
        return summary

    def _compare(self, version: int) -> None:
        self._wait("begin", *self._calls.sending("begin", version, None))
        if self.plan.at_once:
            summary = self._write()
            different = self._wait("compare", self._calls.receiving("compare_pulled", summary))[0]
        else:
            different = [name for names in self._pass_on("compare") for name in names]
        if different:
            raise RunError(
                f"--check-weight-update-equal: after the update to version {version} the engine holds other values "
                f"than the trainer in {len(different)} tensors, such as {', '.join(different[:3])}"
            )

    def _write(self) -> Summary:
        self._wait("write", *self._calls.sending("next_bucket"))
        summary: Summary = self._wait("finish", *self._calls.sending("finish")[:1])[0]
        return summary

    def _pass_on(self, call: str, *arguments: Any) -> list[Any]:
        """Hand every bucket to ``call`` of the receiving end, while the next one is packed; what the calls return."""
        results = []
        bucket = self._wait("pack", *self._calls.sending("next_bucket"))[0]
        while bucket is not None:
            sent = self._calls.sending("send") if self.plan.channel == "distributed" else []
            taken = self._calls.receiving(call, bucket, *arguments)
            upcoming = self._calls.sending("next_bucket")
            done = self._wait(call, taken, *sent, *upcoming)
            results.append(done[0])
            bucket = done[1 + len(sent)]
        return results

    def _wait(self, what: str, *begun: Any) -> list[Any]:
        try:
            return self._calls.wait(begun, self.plan.timeout)
        except TimeoutError as error:
            raise RunError(
                f"the weight update's step {what!r} over --weight-update-channel {self.plan.channel} was not done "
                f"within --weight-update-timeout {self.plan.timeout:g} s"
            ) from error

    def _give_up(self, version: int, error: BaseException) -> bool:
        """Tell both ends; one that does not listen any more cannot answer from half of the weights either.

        Whether both have heard it: then neither is in the middle of anything, and an update may begin anew.
        """
        self._broke_off = True
        reason = f"the update to weight version {version} failed: {error}"
        heard = [False, False]
        with contextlib.suppress(Exception):
            self._calls.wait([self._calls.receiving("fail", reason)], _GIVE_UP)
            heard[0] = True
        with contextlib.suppress(Exception):
            heard[1] = all(self._calls.wait(self._calls.sending("cancel"), _GIVE_UP))
        return all(heard)
