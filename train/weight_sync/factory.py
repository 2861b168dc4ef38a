"""Which channel carries weights, decided in one place; what a channel needs is imported only where it is used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from accel.comm.process_groups import LOOPBACK
from accel.contract import Accelerator
from rollout.deploy.addresses import parse_address
from rollout.deploy.config import ServerChannel
from samples.errors import InputError
from train.config.run import RunConfig
from train.weight_sync.plan import Channel, Offer, UpdatePlan

if TYPE_CHECKING:
    from train.weight_sync.receiving import Receiver
    from train.weight_sync.sending import Sender
    from train.weight_sync.updater import Calls, WeightUpdater


def create_weight_updater(
    config: RunConfig, calls: Calls, run_dir: Path, note: Callable[[str], None] | None = None
) -> WeightUpdater:
    """The updater of a run, its channel open at both ends.

    ``calls`` reaches the trainer's ranks and the rollout worker. With ``--weight-update-channel auto`` weights stay in
    the process where all is one process, go through shared memory where trainer and rollout worker share a machine, and
    through a process group (``distributed``) elsewhere. Raises InputError for a channel that cannot work here.
    """
    from train.weight_sync.updater import WeightUpdater

    channel = chosen_channel(config)
    told = note if note is not None else lambda _: None
    updater = WeightUpdater(calls, check_equal=config.weights.check_weight_update_equal, note=told)
    try:
        updater.open(_plan(config, channel, run_dir))
    except InputError:
        if config.weights.weight_update_channel != "auto" or channel != "tensor":
            raise
        if note is not None:
            note("trainer and rollout worker are on different machines: weights go over a process group")
        updater.open(_plan(config, "distributed", run_dir))
    return updater


def chosen_channel(config: RunConfig) -> Channel:
    """What carries weights from trainer to rollout worker. SGLang servers take them from there as
    ``server_channel`` says."""
    asked = config.weights.weight_update_channel
    serves = server_channel(config)
    if serves == "distributed":
        return "server_group"
    if asked == "auto" or (asked == "disk" and serves is not None):
        asked = "tensor"
    return "in_process" if asked == "tensor" and config.job.launcher == "inline" else asked


def server_channel(config: RunConfig) -> ServerChannel | None:
    """How SGLang servers get weights: from the rollout worker, or from the trainer itself (``distributed``); None for
    the embedded engine."""
    from rollout.engines.choice import choose_engine

    if choose_engine(config.rollout)[0] != "sglang":
        return None
    asked = config.weights.weight_update_channel
    return asked if asked in ("tensor", "distributed") else "disk"


def open_sender(plan: UpdatePlan, accelerator: Accelerator) -> Sender:
    """The first trainer rank's end."""
    if plan.channel == "in_process":
        from train.weight_sync.in_process import InProcessSender

        return InProcessSender(plan.bucket_bytes)
    if plan.channel == "tensor":
        from train.weight_sync.shared_memory import SharedMemorySender

        return SharedMemorySender(plan)
    if plan.channel == "server_group":
        from train.weight_sync.server_group import ServerGroupSender

        return ServerGroupSender(plan, accelerator)
    if plan.channel == "distributed":
        from train.weight_sync.distributed import BroadcastSender

        return BroadcastSender(plan, accelerator)
    from train.weight_sync.disk import DiskSender

    return DiskSender(plan)


def open_receiver(plan: UpdatePlan, offer: Offer | None, accelerator: Accelerator) -> Receiver:
    """The rollout worker's end. Raises InputError where it does not find what the sender offered."""
    if plan.channel == "in_process":
        from train.weight_sync.in_process import InProcessReceiver

        return InProcessReceiver()
    assert offer is not None
    if plan.channel == "tensor":
        from train.weight_sync.shared_memory import SharedMemoryReceiver

        return SharedMemoryReceiver(offer)
    if plan.channel == "server_group":
        from train.weight_sync.server_group import ServerGroupReceiver

        return ServerGroupReceiver()
    if plan.channel == "distributed":
        from train.weight_sync.distributed import BroadcastReceiver

        return BroadcastReceiver(plan, offer, accelerator)
    from train.weight_sync.disk import DiskReceiver

    return DiskReceiver(plan, offer)


def _plan(config: RunConfig, channel: Channel, run_dir: Path) -> UpdatePlan:
    weights = config.weights
    given = weights.weight_update_dir
    return UpdatePlan(
        channel=channel,
        bucket_bytes=weights.update_weight_buffer_size,
        timeout=weights.weight_update_timeout,
        directory=str(run_dir.absolute() if given is None else Path(given).absolute()),
        one_machine=config.job.ray_address is None and not _remote_servers(config),
        keeps_weights=config.sglang.max_engine_restarts > 0 and not config.sglang.rollout_external_engine_addrs,
        retries=weights.weight_update_retries,
    )


def _remote_servers(config: RunConfig) -> bool:
    """Whether servers that somebody else started are on other machines."""
    addresses = config.sglang.rollout_external_engine_addrs
    hosts = [parse_address(address, "--rollout-external-engine-addrs")[0] for address in addresses]
    return any(host != "localhost" and host not in LOOPBACK for host in hosts)
