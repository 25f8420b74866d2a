"""A public service on a real gRPC server, with whatever settings a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from frontend.service import Frontend
from frontend.settings import FrontendSettings
from nano_vllm_grpc.pb import frontend_pb2 as pb
from nano_vllm_grpc.pb.frontend_pb2_grpc import (
    InferenceServiceServicer,
    add_InferenceServiceServicer_to_server,
)
from shared.config import load_settings


class Echo(InferenceServiceServicer):
    """Answers unary calls at once; streams say `open`, then `done` once `finish` is set."""

    def __init__(self) -> None:
        self.finish = asyncio.Event()
        self.abandoned = asyncio.Event()  # a stream was cancelled

    async def Detokenize(self, request: pb.DetokenizeRequest, context: object) -> object:
        return pb.DetokenizeResponse(text="hello")

    async def GenerateStream(
        self, request: pb.GenerateRequest, context: object
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        yield pb.GenerateStreamResponse(text="open")
        try:
            await self.finish.wait()
        except asyncio.CancelledError:
            self.abandoned.set()
            raise
        yield pb.GenerateStreamResponse(text="done")

    async def Generate(self, request: object, context: object) -> object: ...
    async def Tokenize(self, request: object, context: object) -> object: ...
    async def GetModel(self, request: object, context: object) -> object: ...


@asynccontextmanager
async def echo_server(**settings: object) -> AsyncIterator[tuple[str, Echo]]:
    """Runs the server; yields its address and the service."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    server = Frontend(load_settings(FrontendSettings, flags)).server
    echo = Echo()
    add_InferenceServiceServicer_to_server(echo, server.grpc)
    port = server.add_port("127.0.0.1:0")
    await server.grpc.start()
    await server.set_serving(True)
    try:
        yield f"127.0.0.1:{port}", echo
    finally:
        await server.grpc.stop(None)
