"""Holds TCP ports for the forks of a process.

A port is free while the process that listens on it is replaced. Any user of the host could then
take it, read what clients send and answer them. A socket with SO_REUSEPORT that is bound, but does
not listen, shares its port only with processes of the same user, and gets no connections. It passes
to the next program (`shared.process.kept`).
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from shared.process.kept import held_socket

_ANY = ("0.0.0.0", "[::]")


class SharedListener:
    """The sockets of one address, `host:port`, on which the forks of this process listen one after
    another. While no fork lives, connections wait. Other processes of this user may listen, too."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.sockets: list[socket.socket] = []  # bound once the port is held


@contextmanager
def held_ports(
    alone: Sequence[str], together: Sequence[str] = (), listener: SharedListener | None = None
) -> Iterator[None]:
    """Holds the ports of these addresses, `host:port`; port 0 means none.

    Args:
        alone: addresses on which only the forks of this process listen.
        together: addresses on which other processes of this user may listen, too.
        listener: gets its sockets.

    Raises:
        OSError: a port is in use, or a host is not an address of this machine.
    """
    with ExitStack() as sockets:
        for address in (*alone, *together, *([listener.address] if listener else [])):
            host, _, port = address.rpartition(":")
            try:
                for each in _hosts(host) if int(port) else ():
                    held = sockets.enter_context(_hold(each, int(port), address in alone))
                    if listener and address == listener.address:
                        listener.sockets.append(held)
            except OSError as error:
                raise OSError(f"cannot listen on {address}: {error.strerror}") from error
        yield


def _hold(host: str, port: int, alone: bool) -> socket.socket:
    if inherited := held_socket(host, port):
        return inherited
    if alone:
        # Like a server, this ignores connections in TIME_WAIT.
        bound_socket(host, port, socket.SO_REUSEADDR).close()
    return bound_socket(host, port, socket.SO_REUSEPORT)


def _hosts(host: str) -> set[str]:
    """Returns the addresses on which gRPC listens for this host."""
    if host in _ANY and socket.has_dualstack_ipv6():
        return {"::"}  # and IPv4
    found = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)
    return {str(sockaddr[0]) for *_, sockaddr in found}


def bound_socket(host: str, port: int, option: int) -> socket.socket:
    """Returns a bound socket with this option, SO_REUSEADDR or SO_REUSEPORT; it does not listen.

    Raises:
        OSError: the port is in use, or the host is not an address of this machine.
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
