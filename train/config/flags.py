"""The flags: every field of every section of RunConfig, under one flat set of names."""

from __future__ import annotations

import types
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo

from train.config.run import RunConfig

NONE = "none"  # the word that clears an optional value or a list, on the command line and in a file


@dataclass(frozen=True)
class Flag:
    """One field of one section, as a person sets it: ``--rollout-top-p`` for ``rollout.rollout_top_p``."""

    name: str  # of the field
    section: str  # of the field in RunConfig that holds it
    info: FieldInfo
    kind: type  # bool, int, float or str; of a list, that of its items
    choices: tuple[str, ...]  # empty unless the field is a Literal
    optional: bool  # may be None
    many: bool  # a tuple

    @property
    def option(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def takes_value(self) -> bool:
        return self.kind is not bool

    @property
    def default(self) -> Any:
        return self.info.get_default(call_default_factory=True)

    @property
    def expects(self) -> str:
        """What may be given, in words: ``a whole number >= 1``."""
        if self.choices:
            one = " or ".join(self.choices) if len(self.choices) < 3 else "one of " + ", ".join(self.choices)
        else:
            noun = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[self.kind]
            one = " ".join(filter(None, (noun, self.bounds)))
        if self.many:
            one = "a list, each " + one
        return f"{one}, or none" if self.optional else one

    @property
    def bounds(self) -> str:
        """``> 0 and <= 1``, or an empty string."""
        said = []
        for bound in self.info.metadata:
            match bound:
                case Gt():
                    said.append(f"> {bound.gt}")
                case Ge():
                    said.append(f">= {bound.ge}")
                case Lt():
                    said.append(f"< {bound.lt}")
                case Le():
                    said.append(f"<= {bound.le}")
        return " and ".join(said)

    @cached_property
    def adapter(self) -> TypeAdapter[Any]:
        """Validates a value of this field alone, with the field's bounds."""
        annotated: Any = Annotated[self.info.annotation, self.info]
        return TypeAdapter(annotated)


def _flag(section: str, name: str, info: FieldInfo) -> Flag:
    kind: Any = info.annotation
    optional = many = False
    choices: tuple[str, ...] = ()
    if get_origin(kind) in (Union, types.UnionType):
        (kind,) = (member for member in get_args(kind) if member is not type(None))
        optional = True
    if get_origin(kind) is tuple:
        kind = get_args(kind)[0]
        many = True
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        kind = str
    if kind not in (bool, int, float, str):
        raise TypeError(f"RunConfig.{section}.{name}: a field is a bool, int, float, str, Literal or a tuple of them")
    return Flag(name, section, info, kind, choices, optional, many)


@cache
def sections() -> dict[str, type[BaseModel]]:
    """Section classes by their names in RunConfig, in the order of ``--help``."""
    found: dict[str, type[BaseModel]] = {}
    for name, info in RunConfig.model_fields.items():
        if not (isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)):
            raise TypeError(f"RunConfig.{name} is no section")
        found[name] = info.annotation
    return found


@cache
def flags() -> dict[str, Flag]:
    """Every flag by field name. A name may stand in one section only."""
    found: dict[str, Flag] = {}
    for section, model in sections().items():
        for name, info in model.model_fields.items():
            if name in found:
                raise TypeError(f"RunConfig.{section}.{name}: {found[name].section} has a field of that name")
            found[name] = _flag(section, name, info)
    return found
