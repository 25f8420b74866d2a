"""Channels to frontends: TLS and the bearer token."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING

from grpc import aio

from nano_vllm_grpc.channels import keepalive_options, open_channel, stays_on_host
from nano_vllm_grpc.errors import LLMError
from nano_vllm_grpc.pb.frontend_pb2_grpc import InferenceServiceStub
from nano_vllm_grpc.tls import ClientTls, FileError

if TYPE_CHECKING:
    from nano_vllm_grpc.pb.frontend_pb2_grpc import InferenceServiceAsyncStub

_OPTIONS = (
    # A whole prompt with logprobs can exceed gRPC's 4 MB.
    ("grpc.max_receive_message_length", -1),
    # Otherwise channels to one address share a connection, and with it a frontend.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    *keepalive_options(),
)


def connect(
    address: str, tls: ClientTls | None, token: str | None
) -> tuple[aio.Channel, InferenceServiceAsyncStub]:
    """Opens a channel for the running event loop, with a stub on it that sends the token along.

    Args:
        tls, token: None to use the environment (NANO_TLS_CA and so on, NANO_TOKEN).

    Raises:
        LLMError: a file of `tls` cannot be used, or others could read the token in transit.
    """
    tls = tls or ClientTls.from_environment()
    token = token or os.environ.get("NANO_TOKEN")
    allowed = os.environ.get("NANO_ALLOW_PUBLIC_PLAINTEXT", "0").lower() in ("1", "true")
    if token and tls is None and not stays_on_host(address) and not allowed:
        raise LLMError(
            f"token: would be sent to {address} in plaintext: give tls, or set "
            "NANO_ALLOW_PUBLIC_PLAINTEXT=1 if the network is private"
        )
    try:
        channel = open_channel(address, tls, _OPTIONS)
    except FileError as error:
        raise LLMError(str(error)) from error
    stub: InferenceServiceAsyncStub = InferenceServiceStub(channel)
    if token:
        # Not with an interceptor: those of grpc.aio cost a task and a queue per stream.
        metadata = (("authorization", f"Bearer {token}"),)
        for name, call in vars(stub).items():
            setattr(stub, name, functools.partial(call, metadata=metadata))
    return channel, stub
