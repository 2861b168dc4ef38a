"""Run the configured hooks over samples, and decide what becomes of a sample whose hook fails."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from hooks.signature import FLAG, BoundHook, bind_hook
from samples import InputError, Sample, Status, load_function
from samples.cancellation import is_cancelled
from samples.errors import RunError, raised_at

ERROR_KEY = "sample_hook_error"  # where a sample's metadata says which hook failed on it, and how
_ON_ERROR = ("raise", "drop", "fail-sample")
_WEIGHTS = ("weight_version", "last_weight_version", "weight_version_spans")
_NUMBERS = ("index", "group_index", "rollout_id", "prompt_row", "epoch", "source", *_WEIGHTS)
_log = logging.getLogger(__name__)
_loaded: dict[tuple[tuple[str, ...], str, str | None], SampleHooks] = {}
# The settings asked for last: one run asks with the same object for every sample, and a look-up costs microseconds.
_latest: tuple[Any, tuple[str, ...], str, SampleHooks] | None = None


class SampleHookError(RunError):
    """A hook raised; the message names hook and sample, and the hook's own error is the cause."""


class SampleHookTypeError(SampleHookError, TypeError):
    """A hook returned what is no Sample."""


async def apply_rollout_sample_hooks(args: Any, value: Any, **context: Any) -> Any:
    """``value``, a Sample or nested lists of them, after every hook of ``args.rollout_sample_hook_path`` in order.

    Lists come back as new lists of the same shape. A hook is ``hook(args, sample)``, sync or async, and returns a
    Sample or None (meaning the one it was given); anything else is a TypeError. Of ``context`` it gets what its
    signature names: ``rollout_id``, ``evaluation``, ``group_index``, ``weight_version``, everything with ``**kwargs``;
    what the caller leaves out is taken from the sample. With no hook configured ``value`` itself comes back.
    """
    if not args.rollout_sample_hook_path:
        return value
    hooks = load_sample_hooks(args)
    assert hooks is not None
    return await hooks.apply(args, value, context)


def load_sample_hooks(args: Any) -> SampleHooks | None:
    """The configured hooks, loaded and inspected once per process, or None when there is none.

    ``args`` has ``rollout_sample_hook_path``: paths, or a single one. It may be any namespace: without
    ``rollout_sample_hook_on_error`` it means "raise", without ``user_code_dir`` no directory of the user's is searched.
    Raises InputError for a hook that is not there or cannot be called as one.
    """
    global _latest
    paths = args.rollout_sample_hook_path
    if not paths:
        return None
    on_error = getattr(args, "rollout_sample_hook_on_error", "raise")
    if _latest is not None and _latest[0] is args and _latest[1] is paths and _latest[2] == on_error:
        return _latest[3]
    chosen = (paths,) if isinstance(paths, str) else tuple(paths)
    user_code_dir = getattr(args, "user_code_dir", None)
    key = (chosen, on_error, user_code_dir)
    hooks = _loaded.get(key)
    if hooks is None:
        bound = [bind_hook(path, load_function(path, FLAG, user_code_dir)) for path in chosen]
        hooks = _loaded[key] = SampleHooks(bound, on_error=on_error)
    if isinstance(paths, tuple):  # a list may change under the same object
        _latest = (args, paths, on_error, hooks)
    return hooks


def _numbered(returned: Sample, given: Sample) -> Sample:
    """``returned``; a sample that a hook made anew gets the numbers of the one in whose place it stands."""
    if returned is not given:
        for name in _NUMBERS:
            if getattr(returned, name) is None:
                setattr(returned, name, getattr(given, name))
    return returned


class SampleHooks:
    """Hooks in the order in which they run.

    ``on_error``: "raise" ends the run with SampleHookError; "drop" keeps the sample out of training but in the
    statistics (``remove_sample``); "fail-sample" also gives it the status FAILED, so that it does not count as a
    response. Under the last two, later hooks do not see the sample and its metadata says what happened.
    """

    def __init__(self, hooks: Sequence[BoundHook], *, on_error: str = "raise") -> None:
        if on_error not in _ON_ERROR:
            raise InputError(f"--rollout-sample-hook-on-error {on_error!r}: expected one of {', '.join(_ON_ERROR)}")
        self._hooks = tuple(hooks)
        self._on_error = on_error
        self._reported: set[str] = set()

    async def apply(self, args: Any, value: Any, context: Mapping[str, Any]) -> Any:
        """As ``apply_rollout_sample_hooks``. Samples are taken one after the other."""
        if isinstance(value, list):
            return [await self.apply(args, item, context) for item in value]
        if not isinstance(value, Sample):
            raise TypeError(f"sample hooks apply to a Sample or to lists of them, not to {value!r}")
        sample = value
        for hook in self._hooks:
            try:
                returned = hook.call(args, sample, context)
                if returned is not None and not isinstance(returned, Sample) and inspect.isawaitable(returned):
                    returned = await returned
            except (Exception, SystemExit, asyncio.CancelledError) as error:  # whatever leaves those who wait waiting
                if is_cancelled(error):
                    raise
                where = f"sample hook {hook.path} failed on sample {sample.index} (group {sample.group_index})"
                what = f"{type(error).__name__}: {error}"
                if self._on_error == "raise":
                    raise SampleHookError(
                        f"{where}: {what}{raised_at(error)} (--rollout-sample-hook-on-error: raise)"
                    ) from error
                self._report_once(hook, where, error)
                return self._set_aside(sample, f"{hook.path}: {what}")
            if isinstance(returned, Sample):
                sample = _numbered(returned, sample)
            elif returned is not None:
                raise SampleHookTypeError(f"sample hook {hook.path} returned {returned!r}, expected Sample or None")
        return sample

    def _set_aside(self, sample: Sample, what: str) -> Sample:
        sample.metadata[ERROR_KEY] = what
        sample.remove_sample = True
        if self._on_error == "fail-sample":
            sample.status = Status.FAILED
        return sample

    def _report_once(self, hook: BoundHook, where: str, error: BaseException) -> None:
        if hook.path not in self._reported:
            self._reported.add(hook.path)
            _log.warning("%s; later failures of this hook are only marked in the metadata", where, exc_info=error)
