"""Runs a service as a process: its log, its limits, its event loop, in a fork of a parent process.

Before large imports a service disables the garbage collector, which would walk over the imported
objects again and again, a tenth of the time, and find nothing. Forks enable it, with these objects
frozen: no collection of theirs looks at them. Old objects are left alone while there are many: with
4,000 open calls a walk over them takes 0.15 s, for which everybody would wait.
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
from shared.process.death_signal import end_with_parent
from shared.process.fork import CANNOT_START
from shared.process.heartbeat import Heartbeat
from shared.process.parent_process import ParentProcess
from shared.process.ports import held_ports
from shared.telemetry.logging import configure_logging
from shared.telemetry.metrics import ServiceMetrics
from shared.telemetry.metrics_endpoint import open_endpoint
from shared.telemetry.tracing import preload

_COLLECTIONS_EVERY_S = 10.0  # of old objects
_FEW = 20_000  # objects, which take 10 to 15 ms
_MOST = 2_000_000  # more than those of all calls that a service takes: some must be garbage
_IDLE_S = 0.5  # of processor time between collections: nobody is kept waiting

Settings = TypeVar("Settings", bound=ServiceSettings)
Ready = Callable[[], object]

log = structlog.get_logger(__name__)


def run_service(
    name: str,
    settings: Settings,
    serve: Callable[[Settings, Ready], Coroutine[Any, Any, None]],
    start_errors: tuple[type[Exception], ...] = (),
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
    companion: Callable[[Callable[[], None]], None] | None = None,
    metrics: ServiceMetrics | None = None,
    index: int = 0,
    labels: Mapping[str, str] | None = None,
    alone: Sequence[str] = (),
    together: Sequence[str] = (),
    **bound: object,
) -> int:
    """Runs `serve(settings, ready)` on an event loop, in a fork, until it ends.

    Args:
        name: of the service, added to its log lines, as is `bound`.
        serve: calls `ready`, once, when it is serving.
        start_errors: raised by `serve`, besides OSError, if it cannot start; logged as one line.
        companion: runs in a fork of its own, forked before the first that serves, which it
            outlives; another takes its place when it ends. It gets a function to call at least
            every `hang_timeout_s` / 6 seconds: once it has, silence is a hang.
        metrics: served to Prometheus if the settings say where.
        index: which of the service's processes this is.
        labels: that Prometheus is to give to the metrics, besides service and index.
        alone, together: where `serve` listens with SO_REUSEPORT, see `held_ports`.

    Returns:
        The exit status, see `ParentProcess.run`.
    """
    configure_logging(settings, name, **bound)
    raise_descriptor_limit()
    preload(settings.otlp_endpoint)
    if settings.exit_with_parent:
        end_with_parent()
    held = ExitStack()
    try:
        # Before there are forks, so that all of them have the same addresses.
        endpoint = metrics and open_endpoint(settings, name, index, metrics, **labels or {})
        held.enter_context(held_ports(alone, together))
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
        assert companion is not None
        companion(heartbeat.beat)

    with held:
        return ParentProcess(run, settings.hang_timeout_s, accompany if companion else None).run()


@contextmanager
def _reported(heartbeat: Heartbeat, errors: tuple[type[Exception], ...]) -> Iterator[None]:
    """Ends this fork at one of these errors, which tells its parent process why it cannot start."""
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
        gc.freeze()  # what is loaded by now stays, too
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
    """Collects what has survived the collections of young objects now and then, for ever. While
    there is much of it, this waits until the process is idle and the number has doubled, or until
    it grows beyond all bounds."""
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, 1 << 30)
    left = 0
    while True:
        used_s = time.process_time()
        await asyncio.sleep(_COLLECTIONS_EVERY_S)
        is_idle = time.process_time() - used_s < _IDLE_S
        found = len(gc.get_objects(generation=2))
        if found <= _FEW or found > (2 * left if is_idle else max(_MOST, 2 * left)):
            gc.collect()
            left = len(gc.get_objects(generation=2))


def raise_descriptor_limit() -> None:
    """Lets this process, and those it starts, open as many descriptors as the system allows: with
    the usual 1,024, as many silent connections are enough to keep everyone else out."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
