"""Streams one short completion through the public API, to show that a new stack works, and says how
to request more."""

from __future__ import annotations

from collections.abc import Iterator

import grpc

from deploy.errors import LaunchError
from deploy.health import CHANNEL_OPTIONS
from nano_vllm_grpc.channels import open_blocking_channel
from nano_vllm_grpc.pb import frontend_pb2, frontend_pb2_grpc
from nano_vllm_grpc.tls import ClientTls

PROMPT = "Once upon a time"
_MAX_TOKENS = 32
_TIMEOUT_S = 600.0  # a large model on few cores can take minutes per token


def show_completion(address: str, tls: ClientTls | None, token: str | None) -> None:
    """Prints a completion as it comes.

    Raises:
        LaunchError: the request failed; the message has its status.
    """
    print(f"\n{PROMPT}", end="", flush=True)
    for text in completion(address, tls, token):
        print(text, end="", flush=True)
    print("\n")


def completion(
    address: str, tls: ClientTls | None, token: str | None, max_tokens: int = _MAX_TOKENS
) -> Iterator[str]:
    """Yields the pieces of a greedy completion of `PROMPT` as they come.

    Raises:
        LaunchError: the request failed; the message has its status.
    """
    request = frontend_pb2.GenerateRequest(text=PROMPT)
    request.sampling.max_tokens = max_tokens
    request.sampling.temperature = 0
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with open_blocking_channel(address, tls, CHANNEL_OPTIONS) as channel:
        stub = frontend_pb2_grpc.InferenceServiceStub(channel)
        try:
            for response in stub.GenerateStream(request, timeout=_TIMEOUT_S, metadata=metadata):
                yield response.text
        except grpc.RpcError as error:
            reason = f"{error.code().name}: {error.details()}"
            raise LaunchError(f"a request failed: {reason}") from error


def curl_example(url: str, model: str, tls: ClientTls | None, needs_token: bool) -> str:
    """Returns a line that requests a completion over HTTP, on this host."""
    options = "-k " * bool(tls)
    if tls and tls.cert:
        options += f"--cert {tls.cert} --key {tls.key} "
    token = '-H "authorization: Bearer $NANO_TOKEN" ' * needs_token
    return f"""\
  curl {options}{url}/v1/chat/completions {token}-H 'content-type: application/json' \\
    -d '{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
"""
