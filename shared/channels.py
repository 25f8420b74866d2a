"""Channels between processes, and what both ends of a connection agree on.

Whoever dies says goodbye: the kernel closes its connections. A host that vanishes, a partition or a
stopped process does not. So both ends ping while there are calls, and end a connection whose pings
are not answered: it is found dead within one and a half times the keepalive interval. gRPC answers
pings by itself, in threads of its own: a stream may be silent for ever.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
from grpc import aio

from shared.tls import ClientTls, channel_credentials

Options = Sequence[tuple[str, str | int]]

KEEPALIVE_S = 10.0
# A peer that pings more often is told to go (ENHANCE_YOUR_CALM).
_MIN_PING_INTERVAL_S = 5.0
_CONNECT_TIMEOUT_S = 2.0


def keepalive_options(keepalive_s: float = KEEPALIVE_S) -> Options:
    """For either end: pings after `keepalive_s` seconds without a byte while there are calls, and
    gives up when there is no answer within half of that."""
    timeout_ms = round(500 * keepalive_s)
    return (
        ("grpc.keepalive_time_ms", round(1000 * keepalive_s)),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        # What really ends a connection (grpcio 1.85), of a minute by default.
        ("grpc.http2.ping_timeout_ms", timeout_ms),
        ("grpc.keepalive_permit_without_calls", 0),
        # By default gRPC sends two on a silent stream and then hardly any more.
        ("grpc.http2.max_pings_without_data", 0),
    )


def server_keepalive_options(keepalive_s: float = KEEPALIVE_S) -> Options:
    """Allows pings twice as often as an end with the same, or the default, interval sends them."""
    allowed_s = min(_MIN_PING_INTERVAL_S, keepalive_s / 2)
    return (
        *keepalive_options(keepalive_s),
        ("grpc.http2.min_ping_interval_without_data_ms", round(1000 * allowed_s)),
    )


def internal_options(keepalive_s: float) -> Options:
    """For channels between services: messages of any size, and back soon after a loss."""
    return (
        *keepalive_options(keepalive_s),
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        # In spite of its name it also bounds an attempt, whose packets may be lost: from 20 s.
        ("grpc.min_reconnect_backoff_ms", round(1000 * _CONNECT_TIMEOUT_S)),
        # A channel of its own connection: a new one must not wait for an old one's backoff.
        ("grpc.use_local_subchannel_pool", 1),
    )


@dataclass(frozen=True)
class Dialer:
    """How a service connects to another."""

    tls: ClientTls | None = None
    keepalive_s: float = KEEPALIVE_S

    def open(self, address: str) -> aio.Channel:
        """A channel with the certificates that the files hold now.

        Raises:
            FileError: a file cannot be used.
        """
        return open_channel(address, self.tls, internal_options(self.keepalive_s))

    def stamp(self) -> object:
        """Changes when the files do."""
        return self.tls and self.tls.stamp()


PLAINTEXT = Dialer()


def open_channel(address: str, tls: ClientTls | None, options: Options = ()) -> aio.Channel:
    """A channel to `address`, in plaintext without `tls`.

    Raises:
        FileError: a file of `tls` cannot be used.
    """
    if tls is None:
        return aio.insecure_channel(address, options=options)
    return aio.secure_channel(
        address, channel_credentials(tls), options=(*options, *_name_options(address, tls))
    )


def open_blocking_channel(address: str, tls: ClientTls | None, options: Options) -> grpc.Channel:
    """As `open_channel`, for programs without asyncio."""
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(
        address, channel_credentials(tls), options=(*options, *_name_options(address, tls))
    )


def _name_options(address: str, tls: ClientTls) -> Options:
    """Under which name the server's certificate must know it, where that is not the host."""
    # A socket has no name; gRPC would look for its path in the certificate.
    name = tls.server_name or ("localhost" if address.startswith("unix:") else "")
    return (("grpc.ssl_target_name_override", name),) if name else ()


def stays_on_host(address: str) -> bool:
    """Whether only processes of this host can connect to `host:port` or `unix:path`. A host name
    other than localhost is taken to mean an interface."""
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    host = address.removeprefix("ipv4:").removeprefix("ipv6:").removeprefix("dns:").lstrip("/")
    host = host.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
