"""Find a function that the user names by path, ``module.function``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from samples.errors import InputError

_loaded: dict[tuple[str, str | None], Callable[..., Any]] = {}


def load_function(path: str, flag: str, user_code_dir: str | None = None) -> Callable[..., Any]:
    """The callable at ``path`` (``module.function``, ``package.module.Class.method``), loaded once per process.

    ``user_code_dir`` is put at the end of ``sys.path``, so that a file of the user's never shadows a module of ours or
    of Python's. ``flag`` is the flag that gave the path. Raises InputError, with the module's own error as its cause.
    """
    key = (path, user_code_dir)
    if key not in _loaded:
        _loaded[key] = _load(path, flag, user_code_dir)
    return _loaded[key]


def add_user_code_dir(user_code_dir: str) -> Path:
    """Make the modules in ``user_code_dir`` importable, after all others. Returns the directory, absolute."""
    directory = Path(user_code_dir).expanduser().resolve()
    if not directory.is_dir():
        raise InputError(f"--user-code-dir {user_code_dir}: no such directory ({directory})")
    # An editable install finds our packages only where nothing on sys.path has their names: our folder goes first.
    for folder in (str(Path(__file__).resolve().parents[1]), str(directory)):
        if folder not in sys.path:
            sys.path.append(folder)
            importlib.invalidate_caches()
    return directory


def _load(path: str, flag: str, user_code_dir: str | None) -> Callable[..., Any]:
    directory = add_user_code_dir(user_code_dir) if user_code_dir is not None else None
    parts = path.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise InputError(f"{flag} {path!r}: expected module.function, for example rewards.score")
    module, attributes = _import_longest(parts, flag, directory)
    found: Any = module
    for position, name in enumerate(attributes):
        if not hasattr(found, name):
            owner = ".".join(parts[: len(parts) - len(attributes) + position])
            where = f" ({module.__file__})" if getattr(module, "__file__", None) else ""
            raise InputError(f"{flag} {path!r}: {owner}{where} has no {name!r}.{_shadow_note(parts[0], directory)}")
        found = getattr(found, name)
    if not callable(found):
        raise InputError(f"{flag} {path!r}: is a {type(found).__name__}, expected a function")
    return found


def _import_longest(parts: list[str], flag: str, directory: Path | None) -> tuple[ModuleType, list[str]]:
    """The module of the longest importable prefix, and the attribute names that are left (at least one)."""
    path = ".".join(parts)
    for length in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:length])
        try:
            return importlib.import_module(name), parts[length:]
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if name != missing and not name.startswith(missing + "."):
                raise InputError(f"{flag} {path!r}: module {name!r} imports {missing!r}, which is not there") from error
            cause = error
        except (Exception, SystemExit) as error:
            reason = f"{type(error).__name__}: {error}"
            raise InputError(f"{flag} {path!r}: module {name!r} could not be imported: {reason}") from error
    searched = f"in --user-code-dir {directory}" if directory else "(--user-code-dir names the directory it is in)"
    note = _shadow_note(parts[0], directory)
    raise InputError(f"{flag} {path!r}: no module {parts[0]!r} {searched}.{note}") from cause


def _shadow_note(top: str, directory: Path | None) -> str:
    """Says so when the user has a module called ``top`` that Python cannot see because another one comes first."""
    if directory is None:
        return ""
    theirs = next((p for p in (directory / f"{top}.py", directory / top) if p.exists()), None)
    spec = importlib.util.find_spec(top) if theirs is not None else None
    if theirs is None or spec is None:
        return ""
    origins = [spec.origin] if spec.origin else list(spec.submodule_search_locations or [])
    if any(origin.startswith(str(theirs)) for origin in origins):
        return ""
    return f" Your {theirs} is hidden by another module {top!r} ({', '.join(origins)}): rename yours."
