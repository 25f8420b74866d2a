"""Starts, drains and stops the gRPC server of a service, and reports its health."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence

import structlog
from grpc import aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from nano_vllm_grpc.channels import Options, keepalive_options
from nano_vllm_grpc.tls import channel_credentials
from shared.config import ServiceSettings
from shared.rpc.contract import ContractInterceptor
from shared.rpc.health import HealthServicer
from shared.rpc.interceptors import StatusInterceptor
from shared.rpc.open_calls import OpenCalls
from shared.rpc.reading import MessageReader
from shared.rpc.roles import Callers, RoleInterceptor
from shared.tls import server_credentials

log = structlog.get_logger(__name__)

# Larger metadata is rejected with RESOURCE_EXHAUSTED. By default gRPC rejects some from half of it.
_MAX_METADATA_BYTES = 16 << 10
# Open calls of a connection; for further ones its client waits. gRPC also refuses calls while it
# holds more than this, ended ones included. That makes floods of calls that are reset at once
# cheap. With 512, an honest client that cancelled many calls got UNAVAILABLE, too (gRPC 1.85).
_CALLS_PER_CONNECTION = 1024
_CALLS_PER_READ = 4
_PENDING_CALLS = 16_384  # that wait for the event loop; gRPC cancels further ones
MAX_CONNECTIONS = 4096  # of a process; further ones are closed
# A connection is closed if its handshake takes this long, or if it has had no call for _IDLE_S.
HANDSHAKE_S = 10.0
_IDLE_S = 600.0
# Bytes that a connection may send before the process reads them.
_UNREAD_BYTES = 64 << 10
# Time for the last messages and statuses to be sent; a client that does not read would delay the
# end of the process for ever.
FLUSH_S = 1.0
# The same for a service without a grace period. Its clients continue after a lost status, too, and
# gRPC 1.85 sometimes keeps a call for this long after its client has got the status.
_SHORT_FLUSH_S = 0.05


class Server:
    """A gRPC server with health, reflection, error translation and graceful shutdown.

    Health is NOT_SERVING until `set_serving(True)`.

    Args:
        interceptors: this service's own, which accept or reject a call before its message is read.
        callers: the services that may call this one: with TLS only those, and without only those
            of its version; None: anybody may.
        reuse_port: whether several processes may listen on one port.
        ready: called when the server is SERVING for the first time.

    Raises:
        FileError: a certificate file cannot be used.
        ValueError: callers need tokens, but no interceptor would check them.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        service_name: str,
        *,
        interceptors: Sequence[aio.ServerInterceptor] = (),
        callers: Callers | None = None,
        reuse_port: bool = False,
        ready: Callable[[], object] | None = None,
    ) -> None:
        if settings.callers_need_tokens and not interceptors:
            raise ValueError("auth_tokens_file: no interceptor checks tokens")
        self._settings = settings
        self._ready = ready
        self.calls = OpenCalls()
        tls = settings.server_tls
        self._credentials = server_credentials(tls) if tls else None
        if settings.dialer.tls:
            channel_credentials(settings.dialer.tls)  # fails now rather than on the first call
        first: list[aio.ServerInterceptor] = [StatusInterceptor(), self.calls]
        if callers:
            first.append(ContractInterceptor(service_name))
        if tls and callers:
            required = settings.internal_tls_roles == "required"
            first.append(RoleInterceptor(service_name, callers, required))
        self.grpc = aio.server(
            interceptors=[*first, *interceptors, MessageReader()],
            options=_options(settings, reuse_port),
        )
        self._health = HealthServicer(("", service_name))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        if settings.reflected:
            reflection.enable_server_reflection(
                (service_name, health.SERVICE_NAME, reflection.SERVICE_NAME), self.grpc
            )
        self._on_stopping: Callable[[], object] = lambda: None
        self._stopping = asyncio.Event()

    async def set_serving(self, serving: bool) -> None:
        """Sets the status that `grpc.health.v1.Health` reports from now on."""
        self._health.set_serving(serving)
        if serving and self._ready:
            self._ready()
            self._ready = None

    async def start(self, address: str) -> None:
        """Listens on `address`: `host:port`, or `unix:path`, to which only this user may connect.
        From then on, SIGTERM and SIGINT stop the server.

        Raises:
            OSError: the address cannot be bound.
        """
        await self.set_serving(False)
        # The socket must have its mode from the start, because chmod would be too late.
        mask = os.umask(0o177) if address.startswith("unix:") else None
        try:
            port = self.add_port(address)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}: {error}") from error
        finally:
            if mask is not None:
                os.umask(mask)
        if port == 0:
            raise OSError(f"cannot listen on {address}")
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        await self.grpc.start()
        log.info("listening", address=address, tls=self._credentials is not None)

    def add_port(self, address: str) -> int:
        if self._credentials is None:
            return self.grpc.add_insecure_port(address)
        return self.grpc.add_secure_port(address, self._credentials)

    def stop(self) -> None:
        """Ends `wait`; safe to call more than once."""
        self._stopping.set()

    def on_stopping(self, callback: Callable[[], object]) -> None:
        """Calls `callback` when the server begins to drain."""
        self._on_stopping = callback

    async def wait(self) -> None:
        """Serves until SIGTERM, SIGINT or `stop`, then drains the server.

        While the server drains, health is NOT_SERVING, other processes may bind the address and
        clients connect elsewhere (GOAWAY). Calls in progress continue. Calls that outlast the grace
        period (`drain_timeout_s`) end with UNAVAILABLE.
        """
        try:
            await self._stopping.wait()
        except asyncio.CancelledError:
            await self.grpc.stop(None)
            raise
        grace_s = self._settings.drain_timeout_s
        log.info("draining", grace_s=grace_s, calls=self.calls.count)
        self._health.stop()
        self._on_stopping()
        flush_s = FLUSH_S if grace_s else _SHORT_FLUSH_S
        stopped = asyncio.create_task(self.grpc.stop(grace_s + flush_s))
        await self.calls.finished(grace_s)
        self.calls.end()
        await stopped
        log.info("stopped")


def _options(settings: ServiceSettings, reuse_port: bool) -> Options:
    return [
        ("grpc.so_reuseport", int(reuse_port)),
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.max_concurrent_streams", _CALLS_PER_CONNECTION),
        # After this many calls gRPC reads other connections, because a client may make calls and
        # reset them at once.
        ("grpc.http2.max_requests_per_read", _CALLS_PER_READ),
        ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
        # By default gRPC cancels some calls when over 1,000 wait for the event loop.
        ("grpc.server.max_pending_requests", _PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", _PENDING_CALLS),
        ("grpc.server_handshake_timeout_ms", round(1000 * HANDSHAKE_S)),
        ("grpc.max_connection_idle_ms", round(1000 * _IDLE_S)),
        # The receive window, which must not grow with the bandwidth. gRPC enlarges it as far as a
        # message that is being read needs.
        ("grpc.http2.lookahead_bytes", _UNREAD_BYTES),
        ("grpc.http2.bdp_probe", 0),
        *keepalive_options(),
        # The server answers any number of pings. By default gRPC closes a connection with too many
        # pings, but only after pending writes, and each ping costs more than the ping before.
        # Floods then kept all its threads from other connections for up to a second (gRPC 1.85).
        ("grpc.http2.max_ping_strikes", 0),
    ]
