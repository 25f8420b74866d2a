"""A stack's TCP ports: checks that one is free, and holds it until the services listen."""

from __future__ import annotations

import os
import socket

from deploy.errors import LaunchError


def reserve_port(host: str, port: int) -> socket.socket:
    """Binds `host:port` (0: any free port) without listening; holds it while the socket is open.

    Frontends share their port through SO_REUSEPORT, so the kernel would let a second stack take it
    too and mix the two. Hence two binds: a plain one that fails if the port is in use, then one
    that lets our own frontends in and makes any other launcher's plain bind fail.

    Raises:
        LaunchError: the port is taken, or the host is not an address of this machine.
    """
    try:
        if port:
            # As servers do: connections that a stopped stack left in TIME_WAIT do not count.
            _bind(host, port, socket.SO_REUSEADDR).close()
        return _bind(host, port, socket.SO_REUSEPORT)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise LaunchError(f"PORT: cannot listen on {host}:{port}: {reason}") from error


def free_port(host: str = "127.0.0.1") -> int:
    """Returns a TCP port that was free a moment ago."""
    with _bind(host, 0, socket.SO_REUSEADDR) as bound:
        return int(bound.getsockname()[1])


def _bind(host: str, port: int, option: int) -> socket.socket:
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
