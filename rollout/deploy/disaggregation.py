"""Servers of one model that do a part of the work each: prefill, decode, and encoders of images before both.

A prefill server computes the cache of a prompt and hands it to a decode server, which asks it at its bootstrap port;
the router picks the pair for each request. An encoder server turns images into embeddings for the servers with the
language model, which are told where encoders are. The hand-over between prefill and decode is a transfer engine's,
which moves memory of accelerators: on the CPU such servers are planned and refused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.deploy.description import WorkerType
from rollout.deploy.layout import EnginePlan, Layout, ModelPlan
from rollout.deploy.router import Worker

_PREFILL_OR_DECODE = (WorkerType.PREFILL, WorkerType.DECODE)
_HEARS_OF_ENCODERS = (WorkerType.REGULAR, WorkerType.PREFILL)  # a decode server gets prompts encoded already


@dataclass(frozen=True)
class Ports:
    """All held for the server: HTTP and its process group's; ``bootstrap`` is where a prefill server is asked for a
    cache, ``encoders`` where encoders may make themselves known to a language server. None where there is none."""

    http: int
    group: int
    bootstrap: int | None = None
    encoders: int | None = None


async def take_ports(plan: EnginePlan, model: ModelPlan, take: Callable[[], Awaitable[int]]) -> Ports:
    """Ports of one engine; ``take`` gives each time another of the machine where it will run."""
    bootstrap = await take() if plan.worker_type is WorkerType.PREFILL else None
    encoders = await take() if hears_of_encoders(plan, model) else None
    return Ports(http=await take(), group=await take(), bootstrap=bootstrap, encoders=encoders)


def hears_of_encoders(plan: EnginePlan, model: ModelPlan) -> bool:
    return plan.worker_type in _HEARS_OF_ENCODERS and any(
        engine.worker_type is WorkerType.ENCODER for engine in model.engines
    )


def start_order(model: ModelPlan) -> list[list[EnginePlan]]:
    """Engines that start together, one after the other: encoders before those that ask them."""
    first = [engine for engine in model.engines if engine.worker_type is WorkerType.ENCODER]
    rest = [engine for engine in model.engines if engine.worker_type is not WorkerType.ENCODER]
    return [wave for wave in (first, rest) if wave]


def encoder_urls(model: ModelPlan, urls: Mapping[str, str]) -> tuple[str, ...]:
    """Where the model's encoders answer; ``urls`` by an engine's name."""
    return tuple(urls[engine.name] for engine in model.engines if engine.worker_type is WorkerType.ENCODER)


def role_arguments(plan: EnginePlan, ports: Ports, encoders: Sequence[str] = ()) -> dict[str, Any]:
    """SGLang's arguments that say which part of the work the server does."""
    arguments: dict[str, Any] = {}
    if plan.worker_type in _PREFILL_OR_DECODE:
        arguments["disaggregation_mode"] = plan.worker_type.value
    if ports.bootstrap is not None:
        arguments["disaggregation_bootstrap_port"] = ports.bootstrap
    if plan.worker_type is WorkerType.ENCODER:
        arguments["encoder_only"] = True
    elif encoders and plan.worker_type in _HEARS_OF_ENCODERS:
        arguments |= {"language_only": True, "encoder_urls": list(encoders)}
        if ports.encoders is not None:
            arguments["encoder_bootstrap_port"] = ports.encoders
    return arguments


def router_worker(plan: EnginePlan, url: str, ports: Ports) -> Worker | None:
    """What the router is told of the server; None for an encoder, to which it sends nothing."""
    if plan.worker_type is WorkerType.ENCODER:
        return None
    return Worker(url, plan.worker_type.value, ports.bootstrap)


def transfer_problem(layout: Layout, *, exclusive_devices: bool, accelerator: str) -> str | None:
    """Why the layout cannot run on devices that are no accelerators of their own; None where it can."""
    apart = [model.name for model in layout.models if model.disaggregated]
    if exclusive_devices or not apart:
        return None
    return (
        f"model {', '.join(apart)}: prefill and decode are apart, and their transfer engine moves memory of "
        f"accelerators, which {accelerator} is not; use regular groups (or leave --prefill-num-servers out), and "
        "`accelrl rollout plan` to look at the layout alone"
    )
