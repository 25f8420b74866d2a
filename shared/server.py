"""Start, health, drain and end of a gRPC service process."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable

import structlog
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from shared.config import ServiceSettings
from shared.interceptors import StatusInterceptor

log = structlog.get_logger(__name__)

# Over `max_message_bytes` a request is read and refused with INVALID_ARGUMENT; over this many times
# that, gRPC refuses it unread with RESOURCE_EXHAUSTED.
_UNREAD_FACTOR = 16


class Server:
    """A gRPC server with health, reflection, error translation and a graceful end.

    Health is NOT_SERVING until `set_serving(True)`.
    """

    def __init__(
        self, settings: ServiceSettings, service_name: str, *, reuse_port: bool = False
    ) -> None:
        self._settings = settings
        self._service_names = ("", service_name)
        self.grpc = aio.server(
            interceptors=[StatusInterceptor(settings.max_message_bytes)],
            options=[
                ("grpc.so_reuseport", int(reuse_port)),
                ("grpc.max_receive_message_length", _UNREAD_FACTOR * settings.max_message_bytes),
                ("grpc.max_send_message_length", -1),
            ],
        )
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        reflection.enable_server_reflection(
            (service_name, health.SERVICE_NAME, reflection.SERVICE_NAME), self.grpc
        )
        self._stopping = asyncio.Event()

    async def set_serving(self, serving: bool) -> None:
        """What `grpc.health.v1.Health` answers from now on."""
        status = (
            health_pb2.HealthCheckResponse.SERVING
            if serving
            else health_pb2.HealthCheckResponse.NOT_SERVING
        )
        for name in self._service_names:
            await self._health.set(name, status)

    async def start(self, address: str) -> None:
        """Listens on `address`: `host:port` or `unix:path`.

        Raises:
            OSError: the address cannot be bound.
        """
        await self.set_serving(False)
        try:
            port = self.grpc.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}: {error}") from error
        if port == 0:
            raise OSError(f"cannot listen on {address}")
        await self.grpc.start()
        log.info("listening", address=address)

    def stop(self) -> None:
        """Ends `wait`; safe to call more than once."""
        self._stopping.set()

    async def wait(self) -> None:
        """Returns after SIGTERM, SIGINT or `stop`, once calls in progress ended or the grace period
        (`drain_timeout_s`) did."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        try:
            await self._stopping.wait()
        except asyncio.CancelledError:
            await self.grpc.stop(None)
            raise
        log.info("draining", grace_s=self._settings.drain_timeout_s)
        await self._health.enter_graceful_shutdown()
        await self.grpc.stop(self._settings.drain_timeout_s)
        log.info("stopped")


def exit_with_parent(kill: Callable[[], None] | None = None, poll_s: float = 0.5) -> None:
    """Kills this process soon after its parent is gone, whatever the parent died of."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent and parent != 1:
            time.sleep(poll_s)
        (kill or (lambda: os.kill(os.getpid(), signal.SIGKILL)))()

    threading.Thread(target=watch, name="exit-with-parent", daemon=True).start()
