"""Finds free TCP ports for a stack, and holds one until the services listen."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from contextlib import ExitStack
from functools import cache
from itertools import count
from pathlib import Path
from typing import Literal

from deploy.errors import LaunchError
from deploy.stack import bracket_host
from shared.process.ports import bound_socket, held_ports

_USUAL_PORT = 50051
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT = 20_000  # well-known services have lower ports
_TRIES = 100
_SPREAD = 40_503  # processes that ask at the same time begin far apart (Knuth's factor)
_numbers = count()
_open_once = cache(os.open)  # closing a file releases all locks that the process has on it


def reserve_ports(host: str, *ports: int, alone: bool = True) -> ExitStack:
    """Holds ports of `host`, without listening, until the result is closed: this stack's frontends
    may share them, but no other stack. Port 0 means none.

    Args:
        alone: whether no frontend may listen yet.

    Raises:
        LaunchError: a port is in use, or the host is not an address of this machine.
    """
    held = ExitStack()
    try:
        addresses = [f"{bracket_host(host)}:{port}" for port in ports]
        held.enter_context(held_ports(addresses) if alone else held_ports([], addresses))
    except OSError as error:
        raise LaunchError(f"PORT: {error}") from error
    return held


def free_port(host: str = "127.0.0.1") -> int:
    """Returns another free TCP port each time, also among this user's running processes. The kernel
    does not give these ports to clients, so a process that restarts finds its port free again."""
    last = int(_EPHEMERAL.read_text().split()[0]) if _EPHEMERAL.exists() else 0
    for _ in range(_TRIES if last > _FIRST_PORT else 0):
        number = os.getpid() * _SPREAD + next(_numbers)
        port = _FIRST_PORT + number % (last - _FIRST_PORT)
        # With SO_REUSEPORT, as services bind it, closed connections of another server count.
        if _claim(port) and is_free(host, port) and is_free(host, port, socket.SO_REUSEPORT):
            return port
    with bound_socket(host, 0, socket.SO_REUSEADDR) as bound:
        return int(bound.getsockname()[1])


def _claim(port: int) -> bool:
    """Takes the port until this process ends, because its child may not listen yet. Without a file
    for the claims, every port can be taken."""
    try:
        path = os.path.join(tempfile.gettempdir(), f"nano-vllm-grpc-ports-{os.geteuid()}")
        file = _open_once(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError as error:
        return not isinstance(error, BlockingIOError)
    return True


def choose_port(
    name: str, wanted: int | Literal["auto"], host: str, port: int, usual: int, taken: int = 0
) -> int:
    """Returns the port that is `wanted` (0: none). "auto" is the `usual` port for the stack on the
    usual public port, if it is free, and any free port otherwise.

    Raises:
        LaunchError: the wanted port is in use, or is another port of the stack (`port`, `taken`).
    """
    if wanted == "auto":
        if port == _USUAL_PORT and usual != taken and is_free(host, usual):
            return usual
        return free_port(host)
    if wanted and (wanted in (port, taken) or not is_free(host, wanted)):
        raise LaunchError(f"{name}: {wanted} is in use; use another port, or 0 for none")
    return wanted


def is_free(host: str, port: int, option: int = socket.SO_REUSEADDR) -> bool:
    """Whether a server that sets this option could listen on `host:port`."""
    try:
        bound_socket(host, port, option).close()
    except OSError:
        return False
    return True
