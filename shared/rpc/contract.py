"""A service rejects calls of services whose version it may not understand."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc import aio

from shared.channels import CONTRACT, USER_AGENT
from shared.errors import FailedPreconditionError


class ContractInterceptor(aio.ServerInterceptor):
    """Rejects calls of `service` by services with another contract. Other callers may call it."""

    def __init__(self, service: str) -> None:
        self._prefix = f"/{service}/"

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        agent = str(dict(handler_call_details.invocation_metadata).get("user-agent", ""))
        differs = CONTRACT in agent and USER_AGENT not in agent
        if differs and handler_call_details.method.startswith(self._prefix):
            return grpc.stream_stream_rpc_method_handler(_reject, request_deserializer=bytes)
        return await continuation(handler_call_details)


async def _reject(*_: object) -> None:
    raise FailedPreconditionError(
        "the caller is of another version, whose scheduler.proto or worker.proto differs"
    )
