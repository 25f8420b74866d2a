"""Serves the dashboard of a stack: `python -m deploy.dashboard DIRECTORY`."""

from __future__ import annotations

import gc

gc.disable()  # while importing, see `shared.process.run`

import argparse
import asyncio
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import ClassVar

import h11
import uvicorn
from pydantic import Field
from uvicorn.protocols.http.h11_impl import H11Protocol

from deploy.dashboard.app import make_app
from deploy.dashboard.observer import Observer
from deploy.stack import Stack
from nano_vllm_grpc import AsyncLLM
from shared.config import ServiceSettings, settings_or_exit
from shared.process.run import Ready, run_service

_HOST = "127.0.0.1"
_MAX_CONNECTIONS = 64
_MAX_HEAD_BYTES = 16 << 10


class DashboardSettings(ServiceSettings):
    """The stack's settings that the dashboard reads."""

    program: ClassVar[str] = "python -m deploy.dashboard"

    ui_port: int = Field(8080, gt=0, le=65535)


class _Protocol(H11Protocol):
    """uvicorn's protocol, which sends only one answer to a request with a malformed body."""

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None:  # nobody receives the rest of its answer
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:  # the answer has begun
            self.transport.close()


class _Server(uvicorn.Server):
    """uvicorn's server, which reports when it serves, and handles no signals."""

    def __init__(self, config: uvicorn.Config, ready: Ready) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for connection in self.server_state.connections:  # event streams never end
            connection.transport.close()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(stack: Stack, settings: DashboardSettings, ready: Ready) -> None:
    """Serves the dashboard until SIGTERM or SIGINT.

    Raises:
        OSError: the port is in use.
    """
    listener = socket.create_server((_HOST, settings.ui_port), reuse_port=True)
    observer = Observer(stack)
    async with AsyncLLM(stack.address, tls=stack.public_tls) as llm:
        config = uvicorn.Config(
            make_app(stack, observer, llm),
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=_MAX_CONNECTIONS,
            h11_max_incomplete_event_size=_MAX_HEAD_BYTES,
        )
        server = _Server(config, ready)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, server.handle_exit, number, None)
        async with asyncio.TaskGroup() as tasks:
            observing = tasks.create_task(observer.run())
            await server.serve([listener])
            observing.cancel()


def main() -> int:
    parser = argparse.ArgumentParser(prog=DashboardSettings.program)
    parser.add_argument("directory", type=Path)
    stack = Stack.load(parser.parse_args().directory)
    settings = settings_or_exit(DashboardSettings, [])
    return run_service(
        "dashboard", settings, partial(serve, stack), alone=[f"{_HOST}:{settings.ui_port}"]
    )


if __name__ == "__main__":
    sys.exit(main())
