"""The processes of a stack on a Ray cluster, and what each has to know of the others.

Nobody keeps a registry that could be lost: every process chooses its address where Ray has put it,
and tells it to whoever asks (`deploy.ray.process`).

    frontend ──asks──> schedulers ──ask──> the ranks of their engine ──ask──> rank 0
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deploy.plan import Environment, StackSettings
from deploy.stack import bracket_host, dialled_address
from shared.config import PREFIX

_SERVICE_CPUS = 0.25  # of a scheduler, of a frontend
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
    """Where a process is, as `host:port`; `meeting` is where rank 0 meets its engine's ranks."""

    address: str
    meeting: str = ""


@dataclass(frozen=True)
class RayStack:
    """The facts of a stack that its processes need, on whatever node they start."""

    settings: StackSettings
    environment: Environment  # the same and more, NANO_<NAME> for all services
    rank_resources: Mapping[str, float]

    @property
    def tp(self) -> int:
        return self.settings.tp

    def engine(self, index: int) -> list[tuple[Member, Mapping[str, float]]]:
        """The processes of an engine, with what Ray is to reserve for each."""
        ranks = (Member("worker", index * self.tp + rank) for rank in range(self.tp))
        scheduler = Member("scheduler", index)
        return [*((rank, self.rank_resources) for rank in ranks), (scheduler, service_resources())]

    def engine_of(self, member: Member) -> int | None:
        if member.service == "worker":
            return member.index // self.tp
        return member.index if member.service == "scheduler" else None

    def arguments(self, member: Member) -> list[str]:
        """The command line that follows the service's name."""
        if member.service == "worker":
            return ["--rank", str(member.index % self.tp)]
        return ["--index", str(member.index)] if member.service == "frontend" else []

    def meets(self, member: Member) -> bool:
        """Whether this is where its engine's ranks meet."""
        return self.tp > 1 and member.service == "worker" and member.index % self.tp == 0

    def peers(self, member: Member) -> list[str]:
        """The names of those whose endpoints a process has to know before it can start."""
        if member.service == "scheduler":
            return [each.name for each, _ in self.engine(member.index)[: self.tp]]
        rank = member.index % self.tp if member.service == "worker" else 0
        return [Member("worker", member.index - rank).name] if rank else []

    def address(self, member: Member, node: str, port: int) -> str:
        """The address of a process on the node with the IP address `node`, where it is given
        `port`, of which frontends make no use."""
        if member.service != "frontend":
            return f"{bracket_host(node)}:{port}"
        host = self.settings.host.strip("[]")
        return dialled_address(node if host in _ANY_HOST else host, self.settings.port)

    def environment_of(
        self, member: Member, own: Endpoint, peers: Mapping[str, Endpoint], schedulers: Path
    ) -> Environment | None:
        """The environment of a process beside that of its node; None while a needed peer is
        unknown.

        Args:
            schedulers: the file that frontends read the schedulers' addresses from.
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
            # A worker reads no entry but its own.
            ours["WORKER_ADDRESSES"] = ",".join([own.address] * self.tp)
            meeting = peers[needed[0]].meeting if needed else own.meeting
            if meeting:
                host, _, port = meeting.rpartition(":")
                ours |= {"MASTER_ADDR": host.strip("[]"), "MASTER_PORT": port}
        return self.environment | {PREFIX + name: value for name, value in ours.items()}


def service_resources() -> Mapping[str, float]:
    """What Ray is to reserve for a process that is no rank."""
    return {"CPU": _SERVICE_CPUS}
