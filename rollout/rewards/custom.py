"""``--custom-rm-path module.function``: the user's own reward, ``fn(args, sample)``, sync or async."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Callable
from functools import partial

from rollout.rewards.base import CallReward, RewardError
from rollout.rewards.threads import DaemonThreads, Ended
from samples.errors import InputError
from samples.sample import Group, Sample
from samples.signatures import is_coroutine_function

Function = Callable[..., object]


class CustomReward(CallReward):
    """Calls an async function on the event loop and any other one in a thread, each for at most ``timeout`` seconds.

    A sync call that takes longer cannot be stopped: its thread is left behind and the sample's error says so.
    """

    def __init__(
        self, function: Function, path: str, args: object, *, timeout: float, concurrency: int, reward_key: str | None
    ) -> None:
        super().__init__(f"--custom-rm-path {path}", concurrency=concurrency, reward_key=reward_key)
        check_signature(function, self.name)
        self._function = function
        self._args = args
        self._timeout = timeout
        self._on_loop = is_coroutine_function(function)
        self._threads = DaemonThreads("reward")

    async def _call(self, sample: Sample | Group) -> object:
        async with self._slots:
            # Not asyncio.timeout: a TimeoutError that the function itself raises must not be taken for ours.
            call = asyncio.ensure_future(self._invoke(sample))
            try:
                done, _ = await asyncio.wait({call}, timeout=self._timeout)
            finally:
                call.cancel()
            if not done:
                raise RewardError(
                    f"{self.name} took longer than --rm-timeout {self._timeout:g} s for {_subject(sample)}"
                )
            if call.cancelled():
                raise RewardError(f"{self.name} raised CancelledError for {_subject(sample)}")
            try:
                return call.result()
            except Ended as ended:
                raise self._failed(ended.error, sample) from ended.error
            except Exception as error:
                raise self._failed(error, sample) from error

    def _failed(self, error: BaseException, sample: Sample | Group) -> RewardError:
        what = f"{type(error).__name__} for {_subject(sample)}: {error}"
        return RewardError(f"{self.name} raised {what}{_place(error, self._function)}")

    async def _invoke(self, sample: Sample | Group) -> object:
        try:
            if self._on_loop:
                value = self._function(self._args, sample)
            else:
                value = await self._threads.run(self._function, self._args, sample)
            # A plain function may hand out an awaitable too, as a decorated or wrapped async one does.
            return await value if inspect.isawaitable(value) else value
        except (SystemExit, KeyboardInterrupt) as error:  # from a task they would end the event loop
            raise Ended(error) from error

    async def _release(self) -> None:
        self._threads.close()


def _subject(scored: Sample | Group) -> str:
    return f"group {scored[0].group_index}" if isinstance(scored, list) else f"sample {scored.index}"


def check_signature(function: object, name: str) -> None:
    """Raise ``InputError`` unless ``function`` can be called with two positional arguments, ``(args, sample)``."""
    if not callable(function):
        raise InputError(
            f"{name} is not a function but {type(function).__name__}: it must be callable as fn(args, sample)"
        )
    try:
        signature = inspect.signature(function)
    except ValueError:  # some callables written in C tell no signature
        return
    try:
        signature.bind(object(), object())
    except TypeError as error:
        raise InputError(f"{name}{signature} cannot be called as fn(args, sample): {error}") from None


def _place(error: BaseException, function: Function) -> str:
    """Where the user's code raised, or called what raised, for a message that is printed without a traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if frame.filename == _file_of(function)] or frames
    return f" ({theirs[-1].filename}, line {theirs[-1].lineno})" if theirs else ""


def _file_of(function: Function) -> str | None:
    """The file that ``function`` was written in; None for what is not written in Python."""
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function)
    for code in (function, type(function).__call__):
        if inspect.ismethod(code) or inspect.isfunction(code):
            return code.__code__.co_filename
    return None
