"""The client library, plus the unary call that it does not need itself."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from frontend.client import AsyncLLM
from frontend.client.types import Chunk
from frontend.client.wire import encode_request
from shared.pb.frontend_pb2 import GenerateResponse
from tests.chaos.workload import Request


class Client(AsyncLLM):
    """A client with one connection, to one of the frontends that share the port."""

    def follow(self, request: Request, priority: int = 0) -> AsyncGenerator[Chunk, None]:
        return self.stream(request.prompt, request.params, priority=priority)

    async def ask(self, request: Request, priority: int = 0) -> GenerateResponse:
        """Returns the whole answer at once."""
        message = encode_request(request.prompt, request.params, priority)
        return await self._calls.unary(lambda stub: stub.Generate(message))
