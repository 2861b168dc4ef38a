"""``python -m rollout plan``: how engines would lie on devices, without starting anything."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from rollout.deploy.description import Description, Machines, WorkerType, read_description
from rollout.deploy.layout import EnginePlan, Layout, describe_flags, plan_layout
from samples.errors import InputError


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``plan``; a flag wins over the file's [machines]."""
    parser.add_argument("--config", type=Path, default=None, help="description of the servers, .toml or .yaml")
    parser.add_argument("--rollout-num-gpus", type=_count, default=None, help="devices that generate")
    parser.add_argument(
        "--rollout-num-gpus-per-engine", type=_positive, default=None, help="devices of one engine (default: 1)"
    )
    parser.add_argument("--num-gpus-per-node", type=_positive, default=None, help="devices of one node (default: 8)")
    parser.add_argument("--actor-num-gpus", type=_count, default=None, help="devices that train (default: 0)")
    parser.add_argument("--colocate", action="store_true", default=None, help="rollout shares the devices that train")
    parser.add_argument(
        "--prefill-num-servers", type=_count, default=None, help="engines that only prefill; the rest decode"
    )
    parser.add_argument(
        "--rollout-external-engine-addrs", nargs="+", default=None, help="servers that run already, host:port"
    )


def plan(args: argparse.Namespace) -> int:
    """Print the plan. InputError says all that does not fit: group, needed, available."""
    print("\n".join(table(plan_layout(_description(args)))))
    return 0


def _description(args: argparse.Namespace) -> Description:
    given = {
        "num_gpus_per_node": args.num_gpus_per_node,
        "rollout_num_gpus": args.rollout_num_gpus,
        "actor_num_gpus": args.actor_num_gpus,
        "colocate": args.colocate,
    }
    given = {key: value for key, value in given.items() if value is not None}
    if args.config is None:
        if args.rollout_num_gpus is None:
            raise InputError("give --config FILE, or the flags of a plan, beginning with --rollout-num-gpus")
        return describe_flags(
            rollout_num_gpus=args.rollout_num_gpus,
            num_gpus_per_engine=args.rollout_num_gpus_per_engine or 1,
            prefill_num_servers=args.prefill_num_servers or 0,
            external_engine_addrs=args.rollout_external_engine_addrs or (),
            machines=Machines(**given),
        )
    for flag in ("rollout_num_gpus_per_engine", "prefill_num_servers", "rollout_external_engine_addrs"):
        if getattr(args, flag) is not None:
            raise InputError(f"--{flag.replace('_', '-')} with --config {args.config}: the file says it; leave one out")
    description = read_description(args.config)
    return description.model_copy(update={"machines": description.machines.model_copy(update=given)})


def table(layout: Layout) -> list[str]:
    """The plan as lines: a row an engine and a placeholder, then a summary."""
    rows = [("model", "group", "type", "engine", "devices", "node:devices", "weights"), *_rows(layout)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    engines = len(layout.engines)
    where = f" on {layout.nodes} node{'s' if layout.nodes != 1 else ''} of {layout.machines.num_gpus_per_node}"
    external = sum(len(model.external_engine_addrs) for model in layout.models)
    routers = f"{len(layout.models)} router{'s' if len(layout.models) != 1 else ''}"
    summary = f"{engines} engine{'s' if engines != 1 else ''} on {layout.slots} devices{where if layout.slots else ''}"
    return [*lines, f"{summary}, {external} external, {routers}"]


def _rows(layout: Layout) -> Iterator[tuple[str, ...]]:
    per_node = layout.machines.num_gpus_per_node
    for model in layout.models:
        weights = "updated" if model.updates_weights else "frozen"
        for group in model.groups:
            if group.worker_type is WorkerType.PLACEHOLDER:
                ends = dict.fromkeys((group.first, group.first + group.size - 1))
                where = " to ".join(f"{slot // per_node}:{slot % per_node}" for slot in ends)
                yield model.name, str(group.index), group.worker_type.value, "-", str(group.size), where, "-"
            for engine in group.engines:
                yield (
                    model.name,
                    str(group.index),
                    group.worker_type.value,
                    str(engine.index),
                    str(engine.num_devices),
                    _where(engine),
                    weights,
                )
        for address in model.external_engine_addrs:
            yield model.name, "-", "external", "-", "-", address, weights


def _where(engine: EnginePlan) -> str:
    text = " ".join(f"{share.node}:{_ranges(share.devices)}" for share in engine.shares)
    return f"{text} (shared with training)" if engine.shares_with_trainer else text


def _ranges(devices: tuple[int, ...]) -> str:
    return str(devices[0]) if len(devices) == 1 else f"{devices[0]}-{devices[-1]}"


def _count(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of devices")
    return number


def _positive(text: str) -> int:
    number = _count(text)
    if not number:
        raise argparse.ArgumentTypeError(f"{text!r}: at least 1 is needed")
    return number
