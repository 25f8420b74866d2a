"""The processes of a stack on a Ray cluster, and the facts that each needs of the others.

There is no registry that could be lost. Every process chooses its address on the node where Ray has
put it, and its actor tells the address to others that ask (`deploy.ray.process`).

    frontend ──asks──> schedulers ──ask──> the ranks of their engine ──ask──> rank 0
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deploy.plan import Environment, StackSettings
from deploy.stack import bracket_host, dialled_address
from shared.config import PREFIX

_SERVICE_CPUS = 0.25  # of each scheduler and frontend
_ANY_HOST = ("0.0.0.0", "::")


@dataclass(frozen=True)
class Member:
    """A process of the stack. A worker's index counts the ranks of the engines before its own."""

    service: str
    index: int

    @property
    def name(self) -> str:
        return f"{self.service}-{self.index}"

    @classmethod
    def named(cls, name: str) -> Member:
        service, _, index = name.rpartition("-")
        return cls(service, int(index))


@dataclass(frozen=True)
class Endpoint:
    """The address of a process, `host:port`; at `meeting`, rank 0 meets its engine's ranks."""

    address: str
    meeting: str = ""


@dataclass(frozen=True)
class RayStack:
    """The facts of a stack that its processes need, on any node."""

    settings: StackSettings
    environment: Environment  # the settings of all services, as NANO_<NAME>
    rank_resources: Mapping[str, float]

    @property
    def tp(self) -> int:
        return self.settings.tp

    def engine(self, index: int) -> list[tuple[Member, Mapping[str, float]]]:
        """Returns the processes of an engine, with the resources to reserve for each."""
        ranks = (Member("worker", index * self.tp + rank) for rank in range(self.tp))
        scheduler = Member("scheduler", index)
        return [*((rank, self.rank_resources) for rank in ranks), (scheduler, service_resources())]

    def engine_of(self, member: Member) -> int | None:
        if member.service == "worker":
            return member.index // self.tp
        return member.index if member.service == "scheduler" else None

    def arguments(self, member: Member) -> list[str]:
        """Returns the command line after the service's name."""
        if member.service == "worker":
            return ["--rank", str(member.index % self.tp)]
        return ["--index", str(member.index)] if member.service == "frontend" else []

    def meets(self, member: Member) -> bool:
        """Whether the engine's ranks meet at this member."""
        return self.tp > 1 and member.service == "worker" and member.index % self.tp == 0

    def peers(self, member: Member) -> list[str]:
        """Returns the names of the processes whose endpoints a process needs before it starts."""
        if member.service == "scheduler":
            return [each.name for each, _ in self.engine(member.index)[: self.tp]]
        rank = member.index % self.tp if member.service == "worker" else 0
        return [Member("worker", member.index - rank).name] if rank else []

    def address(self, member: Member, node: str, port: int) -> str:
        """Returns the address of a process on the node with the IP address `node`. Frontends do
        not use `port`, but the public port."""
        if member.service != "frontend":
            return f"{bracket_host(node)}:{port}"
        host = self.settings.host.strip("[]")
        return dialled_address(node if host in _ANY_HOST else host, self.settings.port)

    def environment_of(
        self, member: Member, own: Endpoint, peers: Mapping[str, Endpoint], schedulers: Path
    ) -> Environment | None:
        """Returns the environment of a process, to be added to its node's; None while a needed
        peer is unknown.

        Args:
            schedulers: the file from which frontends read the schedulers' addresses.
        """
        needed = self.peers(member)
        if not peers.keys() >= set(needed):
            return None
        ours: Environment = {}
        if member.service == "frontend":
            ours["SCHEDULER_ADDRESSES"] = f"file:{schedulers}"
        elif member.service == "scheduler":
            ours["SCHEDULER_ADDRESS"] = own.address
            ours["ENGINE_NAME"] = str(member.index)
            ours["WORKER_ADDRESSES"] = ",".join(peers[name].address for name in needed)
        else:
            # A worker reads only its own entry.
            ours["WORKER_ADDRESSES"] = ",".join([own.address] * self.tp)
            meeting = peers[needed[0]].meeting if needed else own.meeting
            if meeting:
                host, _, port = meeting.rpartition(":")
                ours |= {"MASTER_ADDR": host.strip("[]"), "MASTER_PORT": port}
        return self.environment | {PREFIX + name: value for name, value in ours.items()}


def service_resources() -> Mapping[str, float]:
    """Returns the resources that Ray is to reserve for a scheduler or frontend."""
    return {"CPU": _SERVICE_CPUS}
