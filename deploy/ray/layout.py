"""The processes of a stack on a Ray cluster, and the facts that each needs of the others.

There is no registry that could be lost. Every process chooses its address on the node where Ray has
put it, and its actor tells the address to others that ask (`deploy.ray.process`).

    frontend ──asks──> schedulers ──ask──> the ranks of their engine ──ask──> rank 0
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deploy.plan import Environment, StackSettings, published_http_port
from deploy.stack import ANY_HOST, Process, bracket_host, dialled_address
from shared.config import PREFIX

_SERVICE_CPUS = 0.25  # of each scheduler and frontend


@dataclass(frozen=True)
class Endpoint:
    """The address of a process, `host:port`, or "" if no process is to call it any more; at
    `meeting`, rank 0 meets its engine's ranks."""

    address: str
    meeting: str = ""


@dataclass(frozen=True)
class RayStack:
    """The facts of a stack that its processes need, on any node."""

    settings: StackSettings
    environment: Environment  # the settings of all services, as NANO_<NAME>
    rank_resources: Mapping[str, float]

    @property
    def http_port(self) -> int:
        return published_http_port(self.settings)

    @property
    def ranks_per_engine(self) -> int:
        return self.settings.ranks_per_engine

    def engine(self, index: int) -> list[Process]:
        """Returns the processes of an engine; their addresses are not known yet."""
        first = index * self.ranks_per_engine
        ranks = (
            Process("worker", first + rank, engine=index) for rank in range(self.ranks_per_engine)
        )
        return [*ranks, Process("scheduler", index, engine=index)]

    def frontends(self, count: int) -> list[Process]:
        return [Process("frontend", index) for index in range(count)]

    def resources(self, process: Process) -> Mapping[str, float]:
        """Returns the resources that Ray is to reserve for a process."""
        return self.rank_resources if process.service == "worker" else {"CPU": _SERVICE_CPUS}

    def arguments(self, process: Process) -> list[str]:
        """Returns the command line after the service's name."""
        if process.service == "worker":
            return ["--rank", str(process.index % self.ranks_per_engine)]
        return ["--index", str(process.index)] if process.service == "frontend" else []

    def meets(self, process: Process) -> bool:
        """Whether the engine's ranks meet at this process."""
        return (
            self.ranks_per_engine > 1
            and process.service == "worker"
            and process.index % self.ranks_per_engine == 0
        )

    def peers(self, process: Process) -> list[str]:
        """Returns the names of the processes whose endpoints a process needs before it starts."""
        if process.service == "scheduler":
            return [each.name for each in self.engine(process.index)[: self.ranks_per_engine]]
        rank = process.index % self.ranks_per_engine if process.service == "worker" else 0
        return [f"worker-{process.index - rank}"] if rank else []

    def address(self, process: Process, node: str, port: int) -> str:
        """Returns the address of a process on the node with the IP address `node`. Frontends do
        not use `port`, but the public port."""
        if process.service != "frontend":
            return f"{bracket_host(node)}:{port}"
        host = self.settings.host.strip("[]")
        return dialled_address(node if host in ANY_HOST else host, self.settings.port)

    def environment_of(
        self, process: Process, own: Endpoint, peers: Mapping[str, Endpoint], schedulers: Path
    ) -> Environment | None:
        """Returns the environment of a process, to be added to its node's; None while a needed
        peer is unknown.

        Args:
            schedulers: the file from which frontends read the schedulers' addresses. Background
                responses are in the folder beside it.
        """
        needed = self.peers(process)
        if not peers.keys() >= set(needed):
            return None
        ours: Environment = {}
        if process.service == "frontend":
            ours["SCHEDULER_ADDRESSES"] = f"file:{schedulers}"
            if self.http_port and "responses_directory" not in self.settings.model_fields_set:
                ours["RESPONSES_DIRECTORY"] = str(schedulers.parent / "responses")
        elif process.service == "scheduler":
            ours["SCHEDULER_ADDRESS"] = own.address
            ours["ENGINE_NAME"] = str(process.index)
            ours["WORKER_ADDRESSES"] = ",".join(peers[name].address for name in needed)
        else:
            # A worker reads only its own entry.
            ours["WORKER_ADDRESSES"] = ",".join([own.address] * self.ranks_per_engine)
            meeting = peers[needed[0]].meeting if needed else own.meeting
            if meeting:
                host, _, port = meeting.rpartition(":")
                ours |= {"MASTER_ADDR": host.strip("[]"), "MASTER_PORT": port}
        return self.environment | {PREFIX + name: value for name, value in ours.items()}
