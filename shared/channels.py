"""Channels from one service to another."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from grpc import aio

from nano_vllm_grpc.channels import Options, keepalive_options, open_channel
from nano_vllm_grpc.tls import ClientTls
from shared.pb import scheduler_pb2, worker_pb2

_CONNECT_TIMEOUT_S = 2.0
# Versions whose services understand each other have the same digest.
CONTRACT = "nano-vllm-grpc-contract/"
_FILES = scheduler_pb2.DESCRIPTOR.serialized_pb + worker_pb2.DESCRIPTOR.serialized_pb
USER_AGENT = CONTRACT + hashlib.sha256(_FILES).hexdigest()[:16]


def internal_options() -> Options:
    """Options for channels between services: messages of any size, quick reconnection,
    and the version of the contract."""
    return (
        *keepalive_options(),
        ("grpc.primary_user_agent", USER_AGENT),
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # The client finds a starting service soon after it listens.
        ("grpc.max_reconnect_backoff_ms", 250),
        # Despite its name this option also limits an attempt, whose packets may be lost. gRPC's
        # default is 20 s.
        ("grpc.min_reconnect_backoff_ms", round(1000 * _CONNECT_TIMEOUT_S)),
        # Each channel has its own connection, so a new channel waits for no other one's backoff.
        ("grpc.use_local_subchannel_pool", 1),
    )


@dataclass(frozen=True)
class Dialer:
    """Opens channels from one service to another."""

    tls: ClientTls | None = None

    def open(self, address: str) -> aio.Channel:
        """Opens a channel with the present contents of the certificate files.

        Raises:
            FileError: a file cannot be used.
        """
        return open_channel(address, self.tls, internal_options())

    def stamp(self) -> object:
        """Returns a value that changes when the certificate files change."""
        return self.tls and self.tls.stamp()


PLAINTEXT = Dialer()
