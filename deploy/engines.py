"""The engines of a running stack: their listing for frontends, their models and their load."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import grpc

from deploy.errors import LaunchError
from deploy.health import CHANNEL_OPTIONS
from deploy.ports import free_port
from deploy.stack import Stack, replace_file
from nano_vllm_grpc.channels import open_blocking_channel
from shared.config import PREFIX
from shared.pb.scheduler_pb2 import GetLoadRequest, GetLoadResponse
from shared.pb.scheduler_pb2_grpc import SchedulerServiceStub

DRAIN_S = 60.0  # for streams that only this engine can finish
_JOIN_S = 10.0
_IDLE_S = 1.0  # longer than frontends take to see that an engine is no longer listed
_LOAD_S = 2.0
_POLL_S = 0.05


def check_engines(stack: Stack) -> None:
    """Checks that the stack may have this number of engines.

    Raises:
        LaunchError: it has several engines, but may have only one.
    """
    if stack.engines == 1:
        return
    if not {"worker", "scheduler"} <= set(stack.services):
        raise LaunchError("ENGINES: several engines need worker and scheduler in SERVICES")
    if stack.num_ranks < stack.ranks_per_engine:
        raise LaunchError("ENGINES: must be 1 with RANKS, whose other ranks run on other hosts")
    sockets = f"unix:{stack.directory}/"
    given = {"SCHEDULER_ADDRESS": [stack.scheduler_address]}
    given["WORKER_ADDRESSES"] = list(stack.worker_addresses)
    for name, addresses in given.items():
        if not all(each.startswith(sockets) for each in addresses):
            raise LaunchError(
                f"ENGINES: must be 1 with {PREFIX}{name}, which is the address of one engine"
            )


def extra_master_ports(stack: Stack, engines: int, taken: int = 0) -> tuple[int, ...]:
    """Returns the ports at which the ranks of engines but the first meet; adds missing ones."""
    ports = list(stack.master_ports)[: engines - 1]
    while stack.ranks_per_engine > 1 and len(ports) < engines - 1:
        if (port := free_port()) not in (taken, *ports):
            ports.append(port)
    return tuple(ports)


def list_engines(stack: Stack, engines: Iterable[int]) -> None:
    """Lists the engines for frontends to use; they move their streams away from all others."""
    lines = (f"{stack.scheduler_address_of(each)}\n" for each in engines)
    replace_file(stack.engines_file, "".join(lines))


def ask_load(stack: Stack, engine: int, timeout_s: float = _LOAD_S) -> GetLoadResponse | None:
    """Returns the load of an engine; None if it does not answer."""
    address, tls = stack.scheduler_address_of(engine), stack.internal_tls
    try:
        with open_blocking_channel(address, tls, CHANNEL_OPTIONS) as channel:
            return SchedulerServiceStub(channel).GetLoad(GetLoadRequest(), timeout=timeout_s)
    except (grpc.RpcError, OSError):
        return None


def ask_loads(stack: Stack, timeout_s: float = _LOAD_S) -> list[GetLoadResponse | None]:
    """Returns the loads of all engines, in order."""
    with ThreadPoolExecutor(max_workers=8) as pool:
        ask = partial(ask_load, stack, timeout_s=timeout_s)
        return list(pool.map(ask, range(stack.engines)))


def num_frontends(stack: Stack, engine: int) -> int:
    """Returns the number of frontends that are connected to an engine; 0 without an answer."""
    load = ask_load(stack, engine)
    return load.frontends if load else 0


def wait_until_left(stack: Stack, engine: int, limit_s: float) -> None:
    """Waits at most `limit_s` seconds until an unlisted engine has no frontends, or has been idle
    for a while: frontends do not leave the only engine with a model."""
    busy_at = time.monotonic()

    def left() -> bool:
        nonlocal busy_at
        load = ask_load(stack, engine)
        if load is None or not load.frontends:
            return True
        if load.running or load.waiting:
            busy_at = time.monotonic()
        return time.monotonic() - busy_at > _IDLE_S

    _wait(left, limit_s)


def wait_until_joined(stack: Stack, engine: int, frontends: int) -> None:
    """Waits, at most `_JOIN_S`, until this number of frontends has joined a listed engine: some
    may have died meanwhile, or get their engines from another source."""
    _wait(lambda: num_frontends(stack, engine) >= frontends, _JOIN_S)


def _wait(condition: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
