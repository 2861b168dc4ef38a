"""Settings of rollout servers and their router."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

ServerChannel: TypeAlias = Literal["disk", "tensor", "distributed"]  # how new weights reach servers


class SGLangConfig(BaseModel):
    """SGLang servers"""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sglang_python: str | None = Field(
        None,
        description="Python that SGLang and its router run in (default: the run's own where SGLang is installed there, "
        "else that of `make sglang-cpu`)",
    )
    rollout_external_engine_addrs: tuple[str, ...] = Field(
        (),
        description="addresses (host:port) of SGLang servers that run already: used instead of starting any, given the "
        "new weights, and left running",
    )
    sglang_config: str | None = Field(
        None,
        description="description of models and their groups of servers (.yaml or .toml), instead of one model with "
        "equal servers; `accelrl rollout plan` shows what it comes to",
    )
    prefill_num_servers: int | None = Field(
        None, ge=1, description="so many of the servers only compute prompts (prefill); the others decode"
    )
    sglang_overrides: tuple[str, ...] = Field(
        (), description="arguments of the servers as name=value, such as mem_fraction_static=0.8"
    )
    sglang_start_timeout: float = Field(
        600.0, gt=0, allow_inf_nan=False, description="seconds that a server may take to start"
    )
    sglang_request_timeout: float = Field(
        3600.0, gt=0, allow_inf_nan=False, description="seconds that one response may take"
    )
    rollout_health_check_interval: float = Field(
        10.0, gt=0, allow_inf_nan=False, description="seconds between two checks of each server"
    )
    rollout_health_check_timeout: float = Field(
        30.0,
        gt=0,
        allow_inf_nan=False,
        description="seconds that a server may take to answer one; three in a row fail it",
    )
    max_engine_restarts: int = Field(
        3,
        ge=0,
        description="servers that have died are started again so often in all, and the router, before the run stops",
    )
    sglang_log_dir: str | None = Field(
        None, description="where servers and router write their logs (default: servers/ in the run directory)"
    )
    sglang_log_level: Literal["debug", "info", "warning", "error"] = Field(
        "warning", description="how much the servers log"
    )
    sglang_router_ip: str | None = Field(None, description="use the router that runs there instead of starting one")
    sglang_router_port: int | None = Field(
        None, ge=1, le=65535, description="its port; without --sglang-router-ip, that of the router started here"
    )
    router_policy: Literal["cache_aware", "round_robin", "random", "power_of_two", "manual"] = Field(
        "cache_aware",
        description="how the router spreads requests over the servers (manual: one server for all responses to a "
        "prompt)",
    )
    router_log_level: Literal["debug", "info", "warn", "error"] = Field("warn", description="how much the router logs")
    router_log_requests: bool = Field(False, description="log every request in the router's log and the servers'")
    router_prometheus_port: int | None = Field(
        None, ge=1, le=65535, description="port of the router's metrics (default: a free one)"
    )
