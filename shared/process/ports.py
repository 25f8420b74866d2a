"""TCP ports that a process keeps for its forks.

A port is free while the process that listens there is replaced, and any user of the host could take
it, read what clients send and answer them. A socket with SO_REUSEPORT that is bound, and does not
listen, shares its port with processes of its own user alone, and gets no connections.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

_ANY = ("0.0.0.0", "[::]")


@contextmanager
def held_ports(alone: Sequence[str], together: Sequence[str] = ()) -> Iterator[None]:
    """Holds the ports of these addresses, `host:port`; port 0 is none.

    Args:
        alone: on which the forks of this process listen, and no other process.
        together: that other processes of this user may listen on, too.

    Raises:
        OSError: one is taken, or is not an address of this machine.
    """
    with ExitStack() as sockets:
        for address in (*alone, *together):
            host, _, port = address.rpartition(":")
            try:
                for each in _hosts(host) if int(port) else ():
                    if address in alone:
                        # As servers do: connections in TIME_WAIT do not count.
                        bound_socket(each, int(port), socket.SO_REUSEADDR).close()
                    sockets.enter_context(bound_socket(each, int(port), socket.SO_REUSEPORT))
            except OSError as error:
                raise OSError(f"cannot listen on {address}: {error.strerror}") from error
        yield


def _hosts(host: str) -> set[str]:
    """The addresses that gRPC listens on for this host."""
    if host in _ANY and socket.has_dualstack_ipv6():
        return {"::"}  # IPv4's as well
    found = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)
    return {str(sockaddr[0]) for *_, sockaddr in found}


def bound_socket(host: str, port: int, option: int) -> socket.socket:
    """A socket with this option, SO_REUSEADDR or SO_REUSEPORT, that is bound and does not listen.

    Raises:
        OSError: the port is taken, or the host is not an address of this machine.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, option, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound
