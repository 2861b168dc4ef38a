"""From a model's plan to its servers, not started yet: hosts, ports, command lines, log files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from accel.contract import Accelerator
from rollout.deploy.addresses import base_url, parse_address
from rollout.deploy.config import SGLangConfig
from rollout.deploy.disaggregation import Ports, encoder_urls, router_worker, start_order, take_ports
from rollout.deploy.hosts import Host, Spawner
from rollout.deploy.layout import EnginePlan, ModelPlan
from rollout.deploy.router import Worker
from rollout.engines.sglang.adopting import EXTERNAL_FLAG
from rollout.engines.sglang.command import ServerSettings, server_command, server_environment
from rollout.engines.sglang.http import HttpClient
from rollout.engines.sglang.server import SGLangServer


@dataclass(frozen=True)
class ServerMaker:
    """What all servers of a model are made from. ``spawner`` says where each runs."""

    model: ModelPlan
    settings: ServerSettings
    config: SGLangConfig
    accelerator: Accelerator
    python: Path
    log_dir: Path
    client: HttpClient
    spawner: Spawner

    async def waves(self) -> list[list[SGLangServer]]:
        """Servers that start together, one wave after the other; servers of somebody else are in the last."""
        places: dict[str, tuple[Host, Ports]] = {}
        for plan in self.model.engines:
            host = await self.spawner.host_of(plan)
            places[plan.name] = host, await take_ports(plan, self.model, host.take_port)
        urls = {name: base_url(host.address, ports.http) for name, (host, ports) in places.items()}
        encoders = encoder_urls(self.model, urls)

        def made(plan: EnginePlan) -> SGLangServer:
            (host, ports), url, name = places[plan.name], urls[plan.name], f"server {plan.name}"
            command = server_command(
                self.python,
                plan,
                self.settings,
                self.config,
                self.accelerator,
                host=host.address,
                ports=ports,
                first_device=host.first_device,
                encoders=encoders,
            )
            environment = server_environment(self.accelerator, self.settings)
            program = host.program(name, command, self.log_dir / f"{plan.name}.log", environment)
            return SGLangServer(name, url, self.client, program, worker=router_worker(plan, url, ports))

        waves = [[made(plan) for plan in wave] for wave in start_order(self.model)] or [[]]
        waves[-1] += [self._adopted(address) for address in self.model.external_engine_addrs]
        return waves

    def _adopted(self, address: str) -> SGLangServer:
        url = base_url(*parse_address(address, EXTERNAL_FLAG))
        return SGLangServer(f"{EXTERNAL_FLAG} {address}", url, self.client, worker=Worker(url))
