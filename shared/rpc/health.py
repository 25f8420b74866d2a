"""Answers grpc.health.v1: whether a server serves, now and at every change.

The servicer of grpcio-health-checking awaits its writes while it holds a lock. A change of the
status needs that lock, so one client that does not read could stop every change. Here watchers do
not wait for each other, and a slow watcher skips to the newest status.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc

from shared.errors import NotFoundError, QueueFullError
from shared.rpc.callers import network_of
from shared.rpc.interceptors import Context

# Open watches of a process and of each host; a load balancer needs one watch.
MAX_WATCHERS = 1024
MAX_WATCHERS_PER_HOST = 128
_RETRY_AFTER_S = 5.0


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # has no types
    """Reports one status for each of `services`: NOT_SERVING until `set_serving(True)`."""

    def __init__(self, services: Sequence[str]) -> None:
        self._services = services
        self._serving = self._stopped = False
        self._watchers: Counter[str] = Counter()  # by host
        self._changed = asyncio.Event()  # set when the present status is replaced

    def set_serving(self, serving: bool) -> None:
        """Sends the status to all watchers, if it changes."""
        if serving != self._serving and not self._stopped:
            self._serving = serving
            self._changed.set()
            self._changed = asyncio.Event()

    def stop(self) -> None:
        """Reports NOT_SERVING from now on; `set_serving` has no further effect."""
        self.set_serving(False)
        self._stopped = True

    async def Check(self, request: pb.HealthCheckRequest, _: Context) -> pb.HealthCheckResponse:
        if request.service not in self._services:
            raise NotFoundError("service: unknown")
        return self._status(request.service)

    async def List(self, _: pb.HealthListRequest, __: Context) -> pb.HealthListResponse:
        return pb.HealthListResponse(statuses={name: self._status(name) for name in self._services})

    async def Watch(self, request: pb.HealthCheckRequest, context: Context) -> None:
        host = network_of(context.peer())
        for limit, num_open in (
            (MAX_WATCHERS, self._watchers.total()),
            (MAX_WATCHERS_PER_HOST, self._watchers[host]),
        ):
            if num_open >= limit:
                raise QueueFullError(f"{limit} watches are open already", _RETRY_AFTER_S)
        self._watchers[host] += 1
        service, sent = request.service, None
        try:
            while True:
                changed, status = self._changed, self._status(service)
                if status != sent:
                    await context.write(status)
                    sent = status
                await changed.wait()
        finally:
            self._watchers[host] -= 1
            if not self._watchers[host]:
                del self._watchers[host]

    def _status(self, service: str) -> pb.HealthCheckResponse:
        status = pb.HealthCheckResponse
        if service not in self._services:
            return status(status=status.SERVICE_UNKNOWN)
        return status(status=status.SERVING if self._serving else status.NOT_SERVING)
