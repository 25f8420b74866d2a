"""Channels between processes, and the options that both ends of a connection must agree on.

The kernel closes the connections of a process that dies, but not if a host vanishes, the network is
partitioned or a process is stopped. Both ends therefore ping while there are calls, and end a
connection whose pings go unanswered. A dead connection is found within one and a half times the
keepalive interval. gRPC answers pings in its own threads, so a stream may stay silent for ever.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

import grpc
from grpc import aio

from nano_vllm_grpc.tls import ClientTls, channel_credentials

Options = Sequence[tuple[str, str | int]]

KEEPALIVE_S = 10.0
_ANSWER_SHARE = 0.5  # of the interval, in which a ping must be answered


def keepalive_options() -> Options:
    """Options for either end. gRPC pings after `KEEPALIVE_S` seconds without a byte while there are
    calls, and ends the connection if there is no answer within half of that."""
    timeout_ms = round(1000 * _ANSWER_SHARE * KEEPALIVE_S)
    return (
        ("grpc.keepalive_time_ms", round(1000 * KEEPALIVE_S)),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        # This option really ends a connection (grpcio 1.85). Its default is a minute.
        ("grpc.http2.ping_timeout_ms", timeout_ms),
        ("grpc.keepalive_permit_without_calls", 0),
        # By default gRPC sends two pings on a silent stream and then hardly any.
        ("grpc.http2.max_pings_without_data", 0),
    )


def open_channel(address: str, tls: ClientTls | None, options: Options = ()) -> aio.Channel:
    """Opens a channel to `address`, in plaintext if `tls` is None.

    Raises:
        FileError: a file of `tls` cannot be used.
    """
    if tls is None:
        return aio.insecure_channel(address, options=options)
    return aio.secure_channel(address, channel_credentials(tls), _named(options, address, tls))


def open_blocking_channel(address: str, tls: ClientTls | None, options: Options) -> grpc.Channel:
    """Opens a channel as `open_channel` does, for programs without asyncio."""
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, channel_credentials(tls), _named(options, address, tls))


def _named(options: Options, address: str, tls: ClientTls) -> Options:
    """Adds the option for the name in the server's certificate, unless that is the host's name."""
    # A Unix socket has no name. gRPC would look for the socket's path in the certificate.
    name = tls.server_name or ("localhost" if address.startswith("unix:") else "")
    return (*options, ("grpc.ssl_target_name_override", name)) if name else options


def stays_on_host(address: str) -> bool:
    """Whether only processes on this host can connect to `host:port` or `unix:path`. Any host name
    other than localhost is assumed to stand for a network interface. An abstract socket
    (`unix-abstract:name`) counts as a network interface, too. It has no mode, and containers that
    share the host's network reach it."""
    if address.startswith("unix-abstract:"):
        return False
    if address.startswith("unix:"):
        return True
    host = address.removeprefix("ipv4:").removeprefix("ipv6:").removeprefix("dns:").lstrip("/")
    host = host.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
