"""A process group whose communicators can be dropped and made anew, while everyone keeps hold of the group itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import GroupName

from accel.comm.inner_groups import (
    GroupArguments,
    build_inner_group,
    current_timeout,
    forget_file,
    generation_prefix,
    meeting_store,
)
from accel.errors import AcceleratorError

# What ReloadableProcessGroup answers itself. All else that a process group has is passed on to the group inside.
OWN = {
    "abort",
    "boxed",
    "merge_remote_group",
    "name",
    "rank",
    "send",
    "recv",
    "shutdown",
    "size",
    "split_group",
    "unbox",
}
OWN |= {"bound_device_id", "get_group_store", "group_desc", "group_name", "set_timeout", "_device_types", "_id"}
OWN |= {"_end_coalescing", "_get_backend_name", "_register_backend", "_set_default_backend", "_set_group_desc"}
OWN |= {"unbox", "_set_group_name", "_start_coalescing", "_pybind11_conduit_v1_"}


class ReloadableProcessGroup(dist.ProcessGroup):
    """Made by torch for the backends of ``accel.comm.reload``; ``dist`` functions take it like any other group.

    Calls from Python go straight to the group inside, and calls from C++ (functional collectives, DDP) come here first.
    While released, every collective is an AcceleratorError.
    """

    host_group: dist.ProcessGroup | None = None  # gloo over all ranks, on the default group; see accel/comm/reload.py

    def __init__(self, arguments: GroupArguments) -> None:
        super().__init__(arguments.rank, arguments.size)  # type: ignore[call-arg]  # the one for subclasses in Python
        self._arguments = arguments
        self._generation = 0
        self._description = ""
        self._bound_device: torch.device | None = None
        self._inner: dist.ProcessGroup | None = None
        self._downward: dist.ProcessGroup | None = None  # see rebuild
        self._coalescing = False
        self._meeting = arguments.store
        self.rebuild()

    @property
    def arguments(self) -> GroupArguments:
        """What the group inside is built from; ``timeout`` as of the last release."""
        return self._arguments

    @property
    def released(self) -> bool:
        return self._inner is None

    def inner(self) -> dist.ProcessGroup:
        """The group inside. Do not keep it: it is another one after a reload. AcceleratorError while released."""
        if self._inner is None:
            raise AcceleratorError(
                f"process group {self._arguments.name} is released: call reload_process_groups() on every rank before "
                "a collective"
            )
        return self._inner

    def rebuild(self, word: str | None = None) -> None:
        """Communicators of the next generation. Blocks until all members do it, where the backend connects at once.

        ``word``: of this reload, the same on every rank; None: members meet at the group's own store.
        """
        self._generation += 1
        meeting = self._arguments.store if word is None else meeting_store(self._arguments, word)
        self._meeting = meeting
        prefix = generation_prefix(self._generation)
        inner = self._described(build_inner_group(self._arguments, meeting, prefix))
        # Backends that coalesce run what is not coalesced in order: two ranks that both send first would wait for each
        # other. torch coalesces a batch of messages for its own class of groups only, so here messages to lower ranks
        # get communicators of their own. Nothing is connected for them before the first message.
        if any(inner._get_backend(device).supports_coalescing for device in self._device_types):
            self._downward = self._described(build_inner_group(self._arguments, meeting, f"{prefix}/downward"))
        self._inner = inner

    def release(self) -> None:
        """Shut the communicators down and let go of them. Nothing may be in flight on any rank."""
        inner = self.inner()
        timeout = current_timeout(inner, self._arguments.backends, self._arguments.timeout)
        self._arguments = replace(self._arguments, timeout=timeout)
        self.shutdown()

    def forget_meeting(self) -> None:
        """Take this generation's keys out of the store; by one rank, once no member needs them."""
        if self._meeting is not self._arguments.store:
            forget_file(self._meeting)
            return
        prefix = generation_prefix(self._generation)
        store = self._arguments.store
        for key in store.list_keys():
            if key.startswith(f"{prefix}/"):
                store.delete_key(key)

    # Torch's end of a group: nothing is left to do for one that is released.

    def shutdown(self) -> None:
        for group in self._let_go():
            group.shutdown()

    def abort(self) -> None:
        for group in self._let_go():
            group.abort()

    def _let_go(self) -> list[dist.ProcessGroup]:
        held = self._held()
        self._inner = self._downward = None
        self._coalescing = False
        return held

    def _held(self) -> list[dist.ProcessGroup]:
        return [group for group in (self._downward, self._inner) if group is not None]

    def _described(self, inner: dist.ProcessGroup) -> dist.ProcessGroup:
        inner._set_group_desc(self._description)
        if self._bound_device is not None:
            inner.bound_device_id = self._bound_device
        return inner

    # Messages between two ranks.

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Any:
        return self._carrier(upward=dst > self.rank()).send(tensors, dst, tag)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> Any:
        return self._carrier(upward=src < self.rank()).recv(tensors, src, tag)

    def _carrier(self, *, upward: bool) -> dist.ProcessGroup:
        inner = self.inner()
        return inner if upward or self._coalescing or self._downward is None else self._downward

    def _start_coalescing(self, device: torch.device) -> None:
        self.inner()._start_coalescing(device)
        self._coalescing = True

    def _end_coalescing(self, device: torch.device) -> Any:
        self._coalescing = False
        return self.inner()._end_coalescing(device)

    # Who the group is, which a release does not change.

    def name(self) -> str:
        # Not the inner one's: C++ that knows a backend by name looks for it where it is not (DDP's logger does).
        return self._arguments.kind

    def get_group_store(self) -> dist.Store:
        return self._arguments.store

    def set_timeout(self, timeout: Any) -> None:
        self._arguments = replace(self._arguments, timeout=timeout)
        for group in self._held():
            group.set_timeout(timeout)

    @property
    def group_name(self) -> GroupName:
        return self._arguments.name

    @property
    def group_desc(self) -> str:
        return self._description

    @property
    def bound_device_id(self) -> torch.device | None:
        return self._bound_device

    @bound_device_id.setter
    def bound_device_id(self, device: torch.device | None) -> None:
        self._bound_device = device
        for group in self._held():
            group.bound_device_id = device

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(device) for device in self._arguments.backends]

    def _get_backend_name(self) -> str:
        return self.name()

    def _set_group_name(self, name: str) -> None:
        if name != self._arguments.name:
            raise AcceleratorError(f"process group {self._arguments.name} cannot be renamed to {name}")

    def _set_group_desc(self, description: str) -> None:
        self._description = description
        for group in self._held():
            group._set_group_desc(description)

    def _register_backend(self, *_: Any) -> None:
        raise AcceleratorError(f"process group {self._arguments.name} has its backends; they cannot be added to")

    def split_group(self, *_: Any, **__: Any) -> Any:
        raise AcceleratorError("a reloadable process group cannot be split: call torch.distributed.new_group")

    def merge_remote_group(self, *_: Any, **__: Any) -> Any:
        raise AcceleratorError("a reloadable process group cannot be merged: initialise one over all ranks")

    # The same by the names that C++ calls.

    def getBackendName(self) -> str:
        return self.name()

    def getGroupName(self) -> str:
        return self._arguments.name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupName(self, name: str) -> None:
        self._set_group_name(name)

    def setGroupDesc(self, description: str) -> None:
        self._set_group_desc(description)


def _passed_on(name: str) -> Callable[..., Any]:
    def call(self: ReloadableProcessGroup, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._inner or self.inner(), name)(*args, **kwargs)

    call.__name__ = name
    return call


def _property_passed_on(name: str) -> property:
    def read(self: ReloadableProcessGroup) -> Any:
        return getattr(self.inner(), name)

    def write(self: ReloadableProcessGroup, value: Any) -> None:
        setattr(self.inner(), name, value)

    return property(read, write)


def _pass_on_the_rest() -> None:
    """Taken from the class itself, so that a collective that a newer torch adds is not left behind."""
    for name, attribute in vars(dist.ProcessGroup).items():
        if name in OWN or name.startswith("__") or name in vars(ReloadableProcessGroup):
            continue
        if isinstance(attribute, property):
            setattr(ReloadableProcessGroup, name, _property_passed_on(name))
        elif callable(attribute) and not isinstance(attribute, type):
            setattr(ReloadableProcessGroup, name, _passed_on(name))


_pass_on_the_rest()
