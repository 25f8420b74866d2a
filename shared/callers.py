"""The caller of a public call, whom limits on memory are counted against."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class Caller:
    """A client: `max_bytes` is how much of a process's memory for messages it may hold at once."""

    name: str
    max_bytes: int


# Set by the interceptor that knows the client; without it, the peer's host is the caller.
CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)


def host_of(peer: str) -> str:
    """The host in `ipv4:10.0.0.1:41234`; all clients on Unix sockets count as one."""
    return peer.rpartition(":")[0] if peer.startswith("ip") else "unix"
