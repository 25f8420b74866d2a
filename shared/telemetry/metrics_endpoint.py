"""Serves a process's metrics over HTTP to every client that reaches its address.

A separate thread answers, so a scrape takes no turn of the event loop or of a step. The thread
shares the interpreter with them, though. So it accepts only a few connections a second and gives
each little time. A flood of connections delays Prometheus, but not the requests.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.process_collector import ProcessCollector

from shared.config import ServiceSettings
from shared.telemetry.metrics import ServiceMetrics

log = structlog.get_logger(__name__)

_PAUSE_S = 0.1  # between connections
_TIMEOUT_S = 1.0  # for a connection; so at most about ten are open
_BACKLOG = 16
_MAX_REQUEST_BYTES = 16 << 10
_RETRY_S = 10.0


class MetricsEndpoint:
    """A listening socket for metrics, which all forks of this process share."""

    def __init__(
        self,
        listener: socket.socket,
        metrics: ServiceMetrics,
        file: Path | None,
        labels: Mapping[str, str],
    ) -> None:
        """`file`, `labels`: see `list_endpoint`; without a file, the endpoint is not listed."""
        self._listener = listener
        self._metrics = metrics
        self._file = file
        self._labels = labels

    def serve(self, restarts: int) -> None:
        """Starts a thread of this process that answers scrapes."""
        self._metrics.restarts = restarts
        registry = CollectorRegistry()
        registry.register(self._metrics)
        ProcessCollector(registry=registry)
        run = self._run(registry)
        threading.Thread(target=asyncio.run, args=(run,), name="metrics", daemon=True).start()

    def close(self) -> None:
        """Closes this process's copy of the socket."""
        self._listener.close()

    async def _run(self, registry: CollectorRegistry) -> None:
        loop = asyncio.get_running_loop()
        tasks = set()
        if self._file:
            host, port = self._listener.getsockname()
            listing = list_endpoint(self._file, f"{host}:{port}", **self._labels)
            tasks.add(asyncio.create_task(listing))
        while True:
            with suppress(OSError):  # the caller is gone, or no descriptors are left
                connection, _ = await loop.sock_accept(self._listener)
                task = asyncio.create_task(_answer(connection, registry))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            await asyncio.sleep(_PAUSE_S)


def open_endpoint(
    settings: ServiceSettings,
    service: str,
    index: int,
    metrics: ServiceMetrics,
    found: socket.socket | None = None,
    **labels: str,
) -> MetricsEndpoint | None:
    """Listens at the address in the settings; returns None if the settings have no address.

    Args:
        found: a socket that listens, see `shared.process.kept`. It is used if it has the address.
        labels: see `list_endpoint`.

    Raises:
        OSError: the port cannot be bound.
    """
    directory = settings.metrics_directory
    address = "127.0.0.1:0" if directory else settings.metrics_address
    if not address:
        return None
    try:
        listener = _listen(address, found)
    except (OSError, OverflowError) as error:  # overflow: the port is above 65,535
        raise OSError(f"metrics_address: cannot listen on {address}: {error}") from error
    listener.setblocking(False)
    file = Path(directory, f"{service}-{index}.json") if directory else None
    return MetricsEndpoint(listener, metrics, file, labels)


def _listen(address: str, found: socket.socket | None) -> socket.socket:
    host, _, number = address.rpartition(":")
    host, port = host.strip("[]"), int(number)
    if found:
        if port in (0, found.getsockname()[1]):
            return found
        found.close()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)


async def list_endpoint(file: Path, address: str, **labels: str) -> None:
    """Writes an address to `<service>-<index>.json`, for Prometheus' file discovery. Prometheus
    labels its metrics with service, index and `labels`. A failed write is repeated."""
    service, _, index = file.stem.rpartition("-")
    entry = {"targets": [address], "labels": {"service": service, "index": index} | labels}
    unfinished = file.with_suffix(".new")
    while True:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            unfinished.write_text(json.dumps([entry]), encoding="utf-8")
            os.replace(unfinished, file)
            return
        except OSError as error:  # a full disk, say
            log.warning("cannot list metrics; trying again", file=str(file), reason=str(error))
        await asyncio.sleep(_RETRY_S)


async def _answer(connection: socket.socket, registry: CollectorRegistry) -> None:
    loop = asyncio.get_running_loop()
    request = b""
    with connection, suppress(OSError, TimeoutError):
        async with asyncio.timeout(_TIMEOUT_S):
            while b"\r\n\r\n" not in request and len(request) < _MAX_REQUEST_BYTES:
                if not (part := await loop.sock_recv(connection, 4096)):
                    return
                request += part
            await loop.sock_sendall(connection, _response(request, registry))


def _response(request: bytes, registry: CollectorRegistry) -> bytes:
    if request.split(maxsplit=2)[:2] != [b"GET", b"/metrics"]:
        return b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    body = generate_latest(registry)
    head = (
        f"HTTP/1.1 200 OK\r\nContent-Type: {CONTENT_TYPE_PLAIN_0_0_4}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
