"""How the ranks of an engine find each other: at an address of rank 0's host."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import psutil

from worker_svc.errors import SupersededError

# The maximum wait for the other ranks in Configure.
JOIN_TIMEOUT = timedelta(seconds=30)
_POLL_S = 0.01
_CONNECTION_S = 1.0  # for a connection to rank 0's store

Result = TypeVar("Result")


def wait_until(met: Callable[[], bool], superseded: Callable[[], bool]) -> None:
    """Waits until `met`.

    Raises:
        SupersededError, RuntimeError: as `Ranks.join`.
    """
    deadline = time.monotonic() + JOIN_TIMEOUT.total_seconds()
    while True:
        if superseded():  # first: in an epoch that others have given up, they have met, too
            raise SupersededError
        if met():
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"not all ranks met within {JOIN_TIMEOUT.total_seconds():g} s")
        time.sleep(_POLL_S)


def listens(host: str, port: int) -> bool:
    """Whether rank 0's store takes connections. A client of the store that is refused tries again
    only after about half a second, and does not notice a newer epoch meanwhile."""
    try:
        socket.create_connection((host, port), _CONNECTION_S).close()
    except OSError:
        return False
    return True


def keep_to_interface_towards(host: str, port: int) -> None:
    """Makes collectives listen only on the interface through which this rank reaches rank 0, even
    if it is loopback. By default Gloo takes the address of the host's own name, and NCCL takes
    every interface but loopback. Interfaces that the user has named are kept."""
    address = at_first_address(host, port, _source_address)
    for interface, addresses in psutil.net_if_addrs().items():
        if address in (each.address for each in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # without =, a prefix
            return
    raise RuntimeError(f"no interface of this host has {address}, its address towards {host}")


def at_first_address(host: str, port: int, use: Callable[[int, Any], Result]) -> Result:
    """Calls `use` on each address of `host` in turn -> its first result without an OSError.

    Raises:
        RuntimeError: `host` has no address, or `use` failed on all of them.
    """
    try:
        candidates = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise RuntimeError(f"ranks cannot meet at {host}, port {port}: {error}") from error
    reasons = []
    for family, _, _, _, address in candidates:
        try:
            return use(family, address)
        except OSError as error:
            reasons.append(str(error))
    raise RuntimeError(f"ranks cannot meet at {host}, port {port}: {'; '.join(reasons)}")


def listen(family: int, address: Any) -> socket.socket:
    """Listens at `address`, even while connections of a dead rank 0 linger (SO_REUSEADDR)."""
    return socket.create_server(address, family=family)


def _source_address(family: int, address: Any) -> str:
    """The source address of this host's packets to `address`. Sends no packet."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        source: str = probe.getsockname()[0]
        return source
