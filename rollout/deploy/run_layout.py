"""The layout of a training run's servers: from ``--sglang-config``, or from flags."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollout.deploy.config import SGLangConfig
from rollout.deploy.description import Description, Machines, read_description
from rollout.deploy.layout import Layout, describe_flags, plan_layout


def run_layout(config: SGLangConfig, *, num_gpus: int | None, num_gpus_per_engine: int) -> Layout:
    """Where the engines lie on the devices that generate, counted from 0 and node by node.

    ``num_gpus``: devices that generate; None: as many as the description needs, or one engine's. Raises InputError.
    """
    if config.sglang_config is not None:
        return plan_layout(_described(config, num_gpus, num_gpus_per_engine))
    external = config.rollout_external_engine_addrs
    count = 0 if external else num_gpus or num_gpus_per_engine * (2 if config.prefill_num_servers else 1)
    return plan_layout(
        describe_flags(
            rollout_num_gpus=count,
            num_gpus_per_engine=num_gpus_per_engine,
            prefill_num_servers=config.prefill_num_servers or 0,
            external_engine_addrs=external,
            machines=Machines(num_gpus_per_node=max(count, 1)),
        )
    )


def _described(config: SGLangConfig, num_gpus: int | None, num_gpus_per_engine: int) -> Description:
    path = Path(str(config.sglang_config))
    description = read_description(path)
    given = description.machines
    needed = sum(group.num_gpus for model in description.models for group in model.server_groups)
    per_node = given.num_gpus_per_node if "num_gpus_per_node" in given.model_fields_set else max(needed, 1)
    models = tuple(
        model.model_copy(update={"num_gpus_per_engine": model.num_gpus_per_engine or num_gpus_per_engine})
        for model in description.models
    )
    # The devices that generate are counted alone: those that train are not among them.
    machines = Machines(num_gpus_per_node=per_node, rollout_num_gpus=num_gpus)
    return description.model_copy(update={"models": models, "machines": machines})


def described_problems(config: SGLangConfig, machines: dict[str, Any]) -> Iterator[str]:
    """What of a description's [machines] the run's flags contradict; ``machines`` is what the flags say, None: nothing.

    Raises InputError for a description that cannot be read.
    """
    if config.sglang_config is None:
        return
    for flag, given in (
        ("--rollout-external-engine-addrs", config.rollout_external_engine_addrs),
        ("--prefill-num-servers", config.prefill_num_servers),
    ):
        if given:
            yield f"{flag} with --sglang-config {config.sglang_config}: the file says it; leave one out"
    written = read_description(Path(config.sglang_config)).machines
    for name in sorted(set(machines) & written.model_fields_set):
        there, ours = getattr(written, name), machines[name]
        if there is not None and ours is not None and there != ours:
            yield (
                f"--sglang-config {config.sglang_config}: machines.{name} is {there}, the run's flags say {ours}; "
                "leave it out of the file"
            )
