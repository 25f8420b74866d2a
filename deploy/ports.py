"""A stack's TCP ports: checks that one is free, and holds it until the services listen."""

from __future__ import annotations

import os
import socket
from itertools import count
from pathlib import Path
from typing import Literal

from deploy.errors import LaunchError
from shared.process.ports import bound_socket

_USUAL_PORT = 50051
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT = 20_000  # below it are those of well-known services
_TRIES = 100
_APART = 40_503  # processes that ask at the same time begin far from each other (Knuth's factor)
_numbers = count()


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
            bound_socket(host, port, socket.SO_REUSEADDR).close()
        return bound_socket(host, port, socket.SO_REUSEPORT)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise LaunchError(f"PORT: cannot listen on {host}:{port}: {reason}") from error


def free_port(host: str = "127.0.0.1") -> int:
    """Returns a TCP port that was free a moment ago, another one each time, and that the kernel
    gives to no client: a process that dies will find it free again."""
    last = int(_EPHEMERAL.read_text().split()[0]) if _EPHEMERAL.exists() else 0
    for _ in range(_TRIES if last > _FIRST_PORT else 0):
        number = os.getpid() * _APART + next(_numbers)
        port = _FIRST_PORT + number % (last - _FIRST_PORT)
        if is_free(host, port):
            return port
    with bound_socket(host, 0, socket.SO_REUSEADDR) as bound:
        return int(bound.getsockname()[1])


def choose_port(
    name: str, wanted: int | Literal["auto"], host: str, port: int, usual: int, taken: int = 0
) -> int:
    """The port that is wanted, 0 for none, or chosen. The usual one belongs to the stack on the
    usual port; where it is not free, and for other stacks, it is any that is.

    Raises:
        LaunchError: the port that is wanted is not free, or is `taken` by another of the stack's.
    """
    if wanted == "auto":
        if port == _USUAL_PORT and usual != taken and is_free(host, usual):
            return usual
        return free_port(host)
    if wanted and (wanted in (port, taken) or not is_free(host, wanted)):
        raise LaunchError(f"{name}: {wanted} is in use; 0 does without")
    return wanted


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen on `host:port`."""
    try:
        bound_socket(host, port, socket.SO_REUSEADDR).close()
    except OSError:
        return False
    return True
