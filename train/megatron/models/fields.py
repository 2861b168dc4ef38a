"""Which fields of a Hugging Face config a family implements, so that none is ever silently ignored."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from samples.errors import InputError

# Generation, tokenizer and initialisation settings; nothing in a forward pass depends on them.
WITHOUT_EFFECT = frozenset(
    {"initializer_range", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id", "max_position_embeddings"}
)

# transformers asks any config for these, whatever its class declares.
OF_ALL: dict[str, tuple[Any, ...]] = {"is_causal": (True,)}


@dataclass(frozen=True)
class ConfigFields:
    """The fields that a family reads, those it takes with certain values only, and those without effect.

    A field of the config's class that is in none of them (a newer transformers may add one) has to be at its default.
    """

    used: frozenset[str]
    accepts: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    checks: Mapping[str, Callable[[Any], str | None]] = field(default_factory=dict)
    without_effect: frozenset[str] = WITHOUT_EFFECT
    together: Callable[[Any], str | None] | None = None  # of the whole config: why its values do not go together
    by_layer: frozenset[str] = frozenset()  # what ``per_layer_config`` may set

    def check(self, hf_config: Any, source: str) -> None:
        """Raise InputError naming the first field whose value this family does not implement, and ``source``."""
        for layer, own in (hf_config.to_dict().get("per_layer_config") or {}).items():
            if others := sorted(set(own) - self.by_layer):
                said = f"per_layer_config[{layer}][{others[0]!r}]"
                raise _refusal(source, hf_config, said, own[others[0]], "this family has it alike in all layers")
        for name, accepted in {**OF_ALL, **self.accepts}.items():
            value = getattr(hf_config, name, accepted[0])
            if value not in accepted:
                choices = " or ".join(repr(choice) for choice in accepted)
                raise _refusal(source, hf_config, name, value, f"only {choices} is implemented")
        for name, reason_against in self.checks.items():
            value = getattr(hf_config, name, None)
            if reason := reason_against(value):
                raise _refusal(source, hf_config, name, value, reason)
        if self.together is not None and (reason := self.together(hf_config)):
            raise InputError(f"{source}: this {hf_config.model_type} config is not supported: {reason}")
        known = self.used | self.accepts.keys() | self.checks.keys() | self.without_effect
        for declared in _declared_fields(hf_config):
            if declared.name in known:  # some may be read by layer only
                continue
            value = getattr(hf_config, declared.name)
            if value != _default(declared):
                raise _refusal(source, hf_config, declared.name, value, "it is not known to this version of accelrl")


def _declared_fields(hf_config: Any) -> list[dataclasses.Field[Any]]:
    """Fields that the family's own config class declares; the base class's say nothing about the model."""
    own = vars(type(hf_config)).get("__annotations__", {})
    return [f for f in dataclasses.fields(hf_config) if f.name in own]


def _default(declared: dataclasses.Field[Any]) -> Any:
    if declared.default_factory is not dataclasses.MISSING:
        return declared.default_factory()
    return declared.default


def _refusal(source: str, hf_config: Any, name: str, value: Any, why: str) -> InputError:
    return InputError(f"{source}: {name}={value!r} in the {hf_config.model_type} config is not supported: {why}")
