"""What a person writes about rollout servers: models, their groups of servers, and the machines (TOML or YAML)."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from enum import StrEnum
from itertools import islice
from pathlib import Path
from reprlib import Repr
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from samples.errors import InputError


class WorkerType(StrEnum):
    REGULAR = "regular"
    PREFILL = "prefill"
    DECODE = "decode"
    ENCODER = "encoder"
    PLACEHOLDER = "placeholder"  # keeps devices free of engines


def _whole(value: Any) -> Any:
    """pydantic takes true for 1; a number of devices is never a switch."""
    if isinstance(value, bool):
        raise ValueError("a whole number is needed, not true or false")
    return value


_shown = Repr()  # of a value that a message repeats: its beginning, whatever it would unfold to
_shown.maxlevel, _shown.maxstring, _shown.maxother = 2, 120, 120
_MOST_VALUES = 1000  # in a group's overrides; YAML's references can unfold to more than memory holds
_MOST = 1_000_000  # devices; more is a slip of the pen, and a plan of it would not end
Count = Annotated[int, BeforeValidator(_whole), Field(le=_MOST)]


def _values(value: Any) -> Iterator[Any]:
    waiting = [value]
    while waiting:
        one = waiting.pop()
        yield one
        if isinstance(one, dict):
            waiting.extend(one.values())
        elif isinstance(one, list):
            waiting.extend(one)


def _bounded(value: Any) -> Any:
    if sum(1 for _ in islice(_values(value), _MOST_VALUES + 1)) > _MOST_VALUES:
        raise ValueError(f"more than {_MOST_VALUES} values; YAML's references unfold to that many, or to themselves")
    return value


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class GroupSpec(_Part):
    """Servers alike: ``num_gpus`` devices in engines of ``num_gpus_per_engine``; ``overrides`` are SGLang arguments."""

    worker_type: WorkerType = WorkerType.REGULAR
    num_gpus: Count = Field(ge=1)
    num_gpus_per_engine: Count | None = Field(None, ge=1)
    overrides: Annotated[dict[str, Any], BeforeValidator(_bounded)] = Field(default_factory=dict)


class ModelSpec(_Part):
    """One model behind one router. ``update_weights`` false: frozen, it keeps the weights that it was started with."""

    name: str = Field(min_length=1)
    model_path: str | None = None  # None: --hf-checkpoint
    update_weights: bool | None = None  # None: true for a model without a path of its own
    num_gpus_per_engine: Count | None = Field(None, ge=1)
    server_groups: tuple[GroupSpec, ...] = ()
    external_engine_addrs: tuple[str, ...] = ()  # servers that somebody else started

    @property
    def receives_updates(self) -> bool:
        return self.model_path is None if self.update_weights is None else self.update_weights


class Machines(_Part):
    """Devices that there are. ``rollout_num_gpus`` None: as many as the groups need."""

    num_gpus_per_node: Count = Field(8, ge=1)
    rollout_num_gpus: Count | None = Field(None, ge=0)
    actor_num_gpus: Count = Field(0, ge=0)  # devices that train; they come first
    colocate: bool = False  # rollout uses the devices that train, from the first on


class Description(_Part):
    models: tuple[ModelSpec, ...] = Field(min_length=1)
    machines: Machines = Machines()


def read_description(path: Path) -> Description:
    """A ``.toml``, ``.yaml`` or ``.yml`` file. InputError names the file and the place in it."""
    document = _document(path)
    if not isinstance(document, dict):
        raise InputError(f"{path}: expected a table with 'models', found {type(document).__name__}")
    if "sglang" in document:  # what slime calls the list
        if "models" in document:
            raise InputError(f"{path}: 'models' and 'sglang' are two names of one list; keep one of them")
        document = {("models" if key == "sglang" else key): value for key, value in document.items()}
    try:
        return Description.model_validate(document)
    except ValidationError as error:
        lines = [f"{path}: {_place(problem['loc'])}: {_words(problem)}" for problem in error.errors()]
        raise InputError("\n".join(lines)) from None


def _document(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InputError(f"{path}: cannot be read: {reason}") from error
    if path.suffix == ".toml":
        try:
            return tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise InputError(f"{path}: not valid TOML: {error}") from error
    if path.suffix in (".yaml", ".yml"):
        try:
            return yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that is none
            raise InputError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    raise InputError(f"{path}: a description of servers is a .toml, .yaml or .yml file")


def _place(location: tuple[int | str, ...]) -> str:
    """``models[0].server_groups[1].num_gpus``"""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text or "the file"


def _words(problem: Any) -> str:
    if problem["type"] == "extra_forbidden":
        return "no such key here"
    if problem["type"] == "missing":
        return "is missing"
    message = problem["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    given = _shown.repr(problem["input"])
    return f"{given}: {message}"
