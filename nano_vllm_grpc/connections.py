"""Connections to the frontends of a server: their channels, TLS and the bearer token."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from nano_vllm_grpc.channels import keepalive_options, open_channel, stays_on_host
from nano_vllm_grpc.errors import LLMError
from nano_vllm_grpc.pb.frontend_pb2_grpc import InferenceServiceStub
from nano_vllm_grpc.tls import ClientTls, FileError

if TYPE_CHECKING:
    from nano_vllm_grpc.pb.frontend_pb2_grpc import InferenceServiceAsyncStub

_OPTIONS = (
    # A message with a whole prompt's logprobs can exceed gRPC's limit of 4 MB.
    ("grpc.max_receive_message_length", -1),
    # Otherwise channels to one address share a connection, and with it a frontend.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    *keepalive_options(),
)
_AVOID_S = 1.0  # how long a failed connection is avoided if there are others


class ServerConnection:
    """One channel and its calls."""

    def __init__(self, address: str, tls: ClientTls | None, token: str | None) -> None:
        """Connects to `address` on the running event loop. If `tls` or `token` is None, the
        environment has it (NANO_TLS_CA and so on, NANO_TOKEN).

        Raises:
            LLMError: a file of `tls` cannot be used, or others could read the token in transit.
        """
        tls = tls or ClientTls.from_environment()
        token = token or os.environ.get("NANO_TOKEN")
        allowed = os.environ.get("NANO_ALLOW_PUBLIC_PLAINTEXT", "0").lower() in ("1", "true")
        if token and tls is None and not stays_on_host(address) and not allowed:
            raise LLMError(
                f"token: {address} would receive it in plaintext; give tls, or set "
                "NANO_ALLOW_PUBLIC_PLAINTEXT=1 if the network is private"
            )
        try:
            self.channel = open_channel(address, tls, _OPTIONS)
        except FileError as error:
            raise LLMError(str(error)) from error
        self.stub: InferenceServiceAsyncStub = InferenceServiceStub(self.channel)
        if token:
            # No interceptor is used, because those of grpc.aio cost a task and a queue per stream.
            metadata = (("authorization", f"Bearer {token}"),)
            for name, call in vars(self.stub).items():
                setattr(self.stub, name, functools.partial(call, metadata=metadata))
        self.address = address
        self.calls = 0  # in progress
        self.avoided_until = 0.0  # time.monotonic

    def failed(self) -> None:
        self.avoided_until = time.monotonic() + _AVOID_S


class Connections:
    """Gives each call the least busy connection that has not just failed."""

    def __init__(
        self,
        addresses: Sequence[str],
        per_address: int,
        tls: ClientTls | None,
        token: str | None,
    ) -> None:
        self._targets = [address for _ in range(per_address) for address in addresses]
        self._tls = tls
        self._token = token
        self._connections: list[ServerConnection] | None = None
        self._closed = False

    @contextmanager
    def lend(self) -> Iterator[ServerConnection]:
        """Lends a connection for the duration of one call.

        Raises:
            RuntimeError: the connections are closed.
        """
        if self._closed:
            raise RuntimeError("this client is closed")
        if self._connections is None:
            self._connections = [
                ServerConnection(each, self._tls, self._token) for each in self._targets
            ]
        now = time.monotonic()
        connection = min(
            self._connections, key=lambda each: (max(each.avoided_until, now), each.calls)
        )
        connection.calls += 1
        try:
            yield connection
        finally:
            connection.calls -= 1

    async def close(self) -> None:
        """Ends the connections and the calls on them."""
        self._closed = True
        for connection in self._connections or ():
            await connection.channel.close()


def split_addresses(address: str | Sequence[str]) -> list[str]:
    """The addresses in a list, or in a text that separates them with commas.

    Raises:
        ValueError: there is no address.
    """
    given = address.split(",") if isinstance(address, str) else address
    addresses = [each.strip() for each in given if each.strip()]
    if not addresses:
        raise ValueError(f"address {address!r} names no server; give host:port or unix:path")
    return addresses
