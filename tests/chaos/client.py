"""The client library, plus the unary call that it does not need itself."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from nano_vllm_grpc import AsyncLLM
from nano_vllm_grpc.pb.frontend_pb2 import GenerateResponse
from nano_vllm_grpc.types import Chunk
from nano_vllm_grpc.wire import encode_request
from tests.chaos.workload import Request


class Client(AsyncLLM):
    """A client with one connection, to one of the frontends that share the port."""

    def follow(self, request: Request, priority: int = 0) -> AsyncGenerator[Chunk, None]:
        return self.stream(request.prompt, request.params, priority=priority)

    async def ask(self, request: Request, priority: int = 0) -> GenerateResponse:
        """Returns the whole answer at once."""
        message = encode_request(request.prompt, request.params, priority)
        return await self._calls.unary(lambda stub: stub.Generate(message))
