"""Runs a service in a fork of a parent process, and sets up its log, limits and event loop.

A service disables the garbage collector before large imports. The collector would visit the
imported objects repeatedly, a tenth of the time, and find nothing. Forks enable it, but freeze
these objects, so it never visits them. It rarely visits old objects while there are many: with
4,000 open calls this takes 0.15 s, for which all calls wait.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import structlog

from shared.config import ServiceSettings
from shared.process.fork import CANNOT_START, Serve
from shared.process.heartbeat import Heartbeat
from shared.process.kept import listening_socket
from shared.process.parent_process import ParentProcess
from shared.process.ports import SharedListener, held_ports
from shared.process.successor import Predecessor
from shared.telemetry.logging import configure_logging
from shared.telemetry.metrics import ServiceMetrics
from shared.telemetry.metrics_endpoint import open_endpoint
from shared.telemetry.tracing import preload

_COLLECTIONS_EVERY_S = 10.0  # of old objects
_FEW_OBJECTS = 20_000  # a collection takes 10 to 15 ms
_MAX_OBJECTS = 2_000_000  # all calls that a service accepts have fewer: some are garbage
_IDLE_S = 0.5  # of processor time between collections: no call has to wait

Settings = TypeVar("Settings", bound=ServiceSettings)
Ready = Callable[[], object]

log = structlog.get_logger(__name__)


def run_service(
    name: str,
    settings: Settings,
    serve: Callable[[Settings, Ready], Coroutine[Any, Any, None]],
    start_errors: tuple[type[Exception], ...] = (),
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
    sidecar: Serve | None = None,
    on_fork_ended: Callable[[int], object] | None = None,
    metrics: ServiceMetrics | None = None,
    index: int = 0,
    labels: Mapping[str, str] | None = None,
    alone: Sequence[str] = (),
    together: Sequence[str] = (),
    listener: SharedListener | None = None,
    **bound: object,
) -> int:
    """Runs `serve(settings, ready)` on an event loop, in a fork -> `ParentProcess.run`'s status.

    Args:
        name: the service's name; log lines contain it, and `bound`.
        serve: calls `ready` exactly once, when it serves.
        start_errors: exceptions of `serve`, besides OSError, if it cannot start; logged as a line.
        sidecar, on_fork_ended: see `ParentProcess`. Once the sidecar has called
            `Heartbeat.beat`, it must call it every `hang_timeout_s` / 6 s.
        metrics: served to Prometheus if the settings have an address for it.
        index, labels: the metrics' labels in Prometheus; `index` counts the service's processes.
        alone, together, listener: where `serve` listens, see `held_ports`.
    """
    configure_logging(settings, name, **bound)
    raise_descriptor_limit()
    preload(settings.otlp_endpoint)
    held = ExitStack()
    try:
        # Before the first fork, so that all forks have the same addresses.
        endpoint = metrics and open_endpoint(
            settings, name, index, metrics, listening_socket(), **labels or {}
        )
        held.enter_context(held_ports(alone, together, listener))
    except OSError as error:
        log.error("cannot start", reason=str(error))
        return CANNOT_START

    def run(heartbeat: Heartbeat) -> None:
        if endpoint:
            endpoint.serve(heartbeat.restarts)
        expected = _reported(heartbeat, (OSError, *start_errors))
        with expected, asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(_serve_and_beat(serve, settings, heartbeat))

    def accompany(heartbeat: Heartbeat) -> None:
        if endpoint:
            endpoint.close()
        assert sidecar is not None
        sidecar(heartbeat)

    role, overlaps = sidecar and accompany, bool(together)
    parent = ParentProcess(run, settings, role, on_fork_ended, overlaps, Predecessor.find())
    with held:
        return parent.run()


@contextmanager
def _reported(heartbeat: Heartbeat, errors: tuple[type[Exception], ...]) -> Iterator[None]:
    """Ends this fork on one of these errors, and tells the parent process why it cannot start."""
    try:
        yield
    except errors as error:
        heartbeat.fail(str(error))
        sys.exit(CANNOT_START)


async def _serve_and_beat(
    serve: Callable[[Settings, Ready], Coroutine[Any, Any, None]],
    settings: Settings,
    heartbeat: Heartbeat,
) -> None:
    def ready() -> None:
        gc.freeze()  # objects that are loaded by now stay, too
        heartbeat.ready()
        heartbeat.beat()

    beating = asyncio.create_task(heartbeat.exchange())
    collecting = asyncio.create_task(collect_old_garbage())
    try:
        await serve(settings, ready)
    finally:
        beating.cancel()
        collecting.cancel()


async def collect_old_garbage() -> None:
    """Collects old objects at intervals, until cancelled. While there are many, it waits until
    their number has doubled and either the process is idle or the number exceeds `_MAX_OBJECTS`."""
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, 1 << 30)
    left = 0
    while True:
        used_s = time.process_time()
        await asyncio.sleep(_COLLECTIONS_EVERY_S)
        is_idle = time.process_time() - used_s < _IDLE_S
        found = len(gc.get_objects(generation=2))
        if found <= _FEW_OBJECTS or found > (2 * left if is_idle else max(_MAX_OBJECTS, 2 * left)):
            gc.collect()
            left = len(gc.get_objects(generation=2))


def raise_descriptor_limit() -> None:
    """Lets this process, and its children, open as many descriptors as the system allows. With the
    usual 1,024, as many silent connections would keep all other clients out."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
