"""SGLang servers: what their settings mean together, and what they cannot do that the embedded engine can."""

from __future__ import annotations

from collections.abc import Iterator

from rollout.deploy.addresses import parse_address
from rollout.deploy.overrides import run_overrides
from rollout.engines.choice import choose_engine
from samples.errors import InputError
from train.config.run import RunConfig


def server_problems(config: RunConfig) -> Iterator[str]:
    if choose_engine(config.rollout)[0] != "sglang" or config.debug.replays:
        return
    job, sglang = config.job, config.sglang
    per_engine = job.rollout_num_gpus_per_engine
    if job.rollout_num_gpus and job.rollout_num_gpus % per_engine:
        yield (
            f"--rollout-num-gpus {job.rollout_num_gpus} does not hold whole engines of --rollout-num-gpus-per-engine "
            f"{per_engine}; use a multiple of {per_engine}"
        )
    external = sglang.rollout_external_engine_addrs
    for address in external:
        try:
            parse_address(address, "--rollout-external-engine-addrs")
        except InputError as error:
            yield str(error)
    if external and job.rollout_num_gpus:
        yield (
            f"--rollout-num-gpus {job.rollout_num_gpus} with --rollout-external-engine-addrs: external servers bring "
            "their own devices; leave it out, or use 0"
        )
    if len(set(external)) < len(external):
        yield "--rollout-external-engine-addrs: an address stands there twice"
    if job.rollout_num_gpus == 0 and not external:
        yield "--rollout-num-gpus 0 with --rollout-engine sglang: no server would be started; leave it out, or use 1"
    if sglang.sglang_router_ip is not None and sglang.sglang_router_port is None:
        yield f"--sglang-router-ip {sglang.sglang_router_ip} needs --sglang-router-port"
    if config.rollout.rollout_min_response_len > 0:
        yield (
            f"--rollout-min-response-len {config.rollout.rollout_min_response_len} with --rollout-engine sglang: its "
            "log-probabilities are then those of the distribution without end tokens, not the policy's; use "
            "--rollout-engine torch"
        )
    try:
        run_overrides(sglang)
    except InputError as error:
        yield str(error)
