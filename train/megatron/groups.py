"""The trainer's process groups over a run: given back between its turns where that is asked for, and ended in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from accel.comm.reload import release_process_groups, reload_process_groups
from accel.contract import Accelerator
from train.checkpoint.errors import CheckpointWriteError
from train.megatron.parallel import leave_ranks


class TrainerGroups:
    """What the trainer does together stands in ``turn``. Every rank takes the same turns in the same order."""

    def __init__(self, accelerator: Accelerator, *, reload: bool) -> None:
        self._accelerator = accelerator
        self._reload = reload
        self._released = False
        self._failed = False

    @contextmanager
    def turn(self, *, give_back: bool | None = None) -> Iterator[None]:
        """One piece of collective work. With ``--reload-process-groups`` the groups are there for it, and given back
        after it where ``give_back`` says so; by default, where they were given back before."""
        back = self._released if give_back is None else give_back
        try:
            if self._released:
                reload_process_groups(self._accelerator)
                self._released = False
            yield
            self._after_turn(give_back=back)
        except CheckpointWriteError:
            # Of the first rank alone, after all that ranks do together: the run goes on, and the others are here too.
            self._after_turn(give_back=back)
            raise
        except BaseException:
            self._failed = True
            raise

    def _after_turn(self, *, give_back: bool) -> None:
        if self._reload and give_back:
            release_process_groups(self._accelerator)
            self._released = True

    def close(self, update_groups: Sequence[Callable[[], None]] = ()) -> None:
        """End all groups; at once, without waiting for peers, where a turn failed."""
        leave_ranks(self._accelerator, failed=self._failed, update_groups=update_groups)
