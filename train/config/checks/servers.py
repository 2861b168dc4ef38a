"""SGLang servers: what their settings mean together, and what they cannot do that the embedded engine can."""

from __future__ import annotations

from collections.abc import Iterator

from rollout.deploy.addresses import parse_address
from rollout.deploy.overrides import run_overrides
from rollout.deploy.run_layout import described_problems, run_layout
from rollout.engines.choice import choose_engine
from samples.errors import InputError
from train.config.run import RunConfig


def server_problems(config: RunConfig) -> Iterator[str]:
    if choose_engine(config.rollout)[0] != "sglang" or config.debug.replays:
        return
    job, sglang = config.job, config.sglang
    per_engine = job.rollout_num_gpus_per_engine
    if sglang.sglang_config is not None or sglang.prefill_num_servers is not None:
        yield from _layout_problems(config)
    elif job.rollout_num_gpus and job.rollout_num_gpus % per_engine:
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
    if job.rollout_num_gpus == 0 and not external and sglang.sglang_config is None:
        yield "--rollout-num-gpus 0 with --rollout-engine sglang: no server would be started; leave it out, or use 1"
    if config.rollout.rollout_min_response_len > 0:
        yield (
            f"--rollout-min-response-len {config.rollout.rollout_min_response_len} with --rollout-engine sglang: its "
            "log-probabilities are then those of the distribution without end tokens, not the policy's; use "
            "--rollout-engine torch"
        )
    yield from _router_problems(config)
    try:
        run_overrides(sglang)
    except InputError as error:
        yield str(error)


def _router_problems(config: RunConfig) -> Iterator[str]:
    sglang = config.sglang
    if sglang.sglang_router_ip is None:
        return
    if sglang.sglang_router_port is None:
        yield f"--sglang-router-ip {sglang.sglang_router_ip} needs --sglang-router-port"
    if sglang.router_prometheus_port is not None:
        yield (
            f"--router-prometheus-port {sglang.router_prometheus_port} with --sglang-router-ip "
            f"{sglang.sglang_router_ip}: that router runs already, with metrics of its own; leave it out"
        )


def _layout_problems(config: RunConfig) -> Iterator[str]:
    """Of ``--sglang-config`` and ``--prefill-num-servers``: what no plan can be made of, and what it cannot serve."""
    job, sglang = config.job, config.sglang
    devices = config.rollout_devices
    said = {
        "rollout_num_gpus": devices,
        "actor_num_gpus": config.trainer_ranks,
        "colocate": config.offload.colocate,
    }
    try:
        problems = list(described_problems(sglang, said))
        if problems:
            yield from problems
            return
        layout = run_layout(sglang, num_gpus=devices, num_gpus_per_engine=job.rollout_num_gpus_per_engine)
    except InputError as error:
        yield from str(error).splitlines()
        return
    frozen = [model.name for model in layout.models if not model.updates_weights]
    if frozen and config.takes_turns:
        yield (
            f"--colocate or --offload with frozen models ({', '.join(frozen)}, --sglang-config): servers give their "
            "weights back in turn, and nobody would send a frozen model's again; serve it elsewhere, or leave both out"
        )
    trained = next(model for model in layout.models if model.updates_weights)
    if not trained.disaggregated:
        return
    rollout, evaluation = config.rollout, config.evaluation
    for flag, value, on in (
        ("--rollout-top-p", rollout.rollout_top_p, rollout.rollout_top_p < 1),
        ("--rollout-top-k", rollout.rollout_top_k, rollout.rollout_top_k > 0),
        ("--eval-top-p", evaluation.eval_top_p, evaluation.eval_top_p < 1),
        ("--eval-top-k", evaluation.eval_top_k, evaluation.eval_top_k > 0),
    ):
        if on:
            yield (
                f"{flag} {value:g} with prefill and decode apart: the ids that were kept come from a server that is "
                "asked past the router, and only the router pairs prefill with decode; use regular groups, or leave it "
                "out"
            )
