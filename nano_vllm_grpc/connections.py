"""Connections to the frontends of a server."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from nano_vllm_grpc.connection import connect
from nano_vllm_grpc.tls import ClientTls

_REST_S = 1.0  # how long a failed connection rests if there are others


class Connection:
    """One channel and its calls. Create it on the event loop that uses it."""

    def __init__(self, address: str, tls: ClientTls | None, token: str | None) -> None:
        self.address = address
        self.channel, self.stub = connect(address, tls, token)
        self.calls = 0  # in progress
        self.rests_until = 0.0  # time.monotonic

    def failed(self) -> None:
        self.rests_until = time.monotonic() + _REST_S


class Connections:
    """Gives each call the least busy connection that has not just failed."""

    def __init__(
        self,
        addresses: Sequence[str],
        per_address: int,
        tls: ClientTls | None,
        token: str | None,
    ) -> None:
        self._targets = [address for address in addresses for _ in range(per_address)]
        self._tls = tls
        self._token = token
        self._made: list[Connection] | None = None
        self._closed = False

    @contextmanager
    def one(self) -> Iterator[Connection]:
        """Lends a connection for the duration of one call.

        Raises:
            RuntimeError: the connections are closed.
        """
        if self._closed:
            raise RuntimeError("this client is closed")
        if self._made is None:
            self._made = [Connection(each, self._tls, self._token) for each in self._targets]
        now = time.monotonic()
        connection = min(self._made, key=lambda each: (max(each.rests_until, now), each.calls))
        connection.calls += 1
        try:
            yield connection
        finally:
            connection.calls -= 1

    async def close(self) -> None:
        """Ends the connections and the calls on them."""
        self._closed = True
        for connection in self._made or ():
            await connection.channel.close()


def split_addresses(address: str | Sequence[str]) -> list[str]:
    """The addresses in a list, or in a text that separates them with commas.

    Raises:
        ValueError: there are none.
    """
    given = address.split(",") if isinstance(address, str) else address
    addresses = [each.strip() for each in given if each.strip()]
    if not addresses:
        raise ValueError(f"address {address!r} names no server; give host:port or unix:path")
    return addresses
