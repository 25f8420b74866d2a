"""Services without a model: the process model of the real ones, in half a second and 40 MB.

The file `behaviour` in the current directory, if there is one, says how workers that are started
misbehave: `refuse` (cannot start), `crash` (dies at once, every time), `stuck` (never gets ready,
and ignores SIGTERM) or `silent` (never gets ready, and answers nothing). A worker refuses a model
without weights.

A frontend counts as connected to a scheduler while that is among the stack's engines. A scheduler
that stops logs whether it still was.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import structlog

from nano_vllm_grpc.pb import frontend_pb2, frontend_pb2_grpc
from shared.config import ServiceSettings, settings_or_exit
from shared.pb import scheduler_pb2, scheduler_pb2_grpc
from shared.process.death_signal import end_with_parent
from shared.rpc.server import Server
from shared.telemetry.logging import configure_logging

WORDS = (", there", " was", " a", " fox")


class InferenceService(frontend_pb2_grpc.InferenceServiceServicer):
    async def GenerateStream(self, request: Any, context: Any) -> Any:
        for index, word in enumerate(WORDS):
            yield frontend_pb2.GenerateStreamResponse(text=word, token_ids=[index])


class SchedulerService(scheduler_pb2_grpc.SchedulerServiceServicer):
    def __init__(self, address: str) -> None:
        self._address = address

    @property
    def listed(self) -> bool:
        file = Path(self._address.removeprefix("unix:")).with_name("engines")
        return file.exists() and self._address in file.read_text().splitlines()

    async def GetLoad(self, request: Any, context: Any) -> Any:
        return scheduler_pb2.GetLoadResponse(
            frontends=int(self.listed), running=3, blocks=64, num_stages=2
        )


def run(settings_class: type[ServiceSettings], service: str) -> None:
    settings: Any = settings_or_exit(settings_class, sys.argv[1:])
    configure_logging(settings, service)
    behaviour = _behaviour() if service == "worker" else None
    no_weights = service == "worker" and not list(Path(settings.model).glob("*.safetensors"))
    if behaviour == "refuse" or no_weights:
        structlog.get_logger().error("cannot start", reason="no weights in this model")
        raise SystemExit(2)
    if behaviour == "crash":
        raise RuntimeError("out of memory, say")
    if settings.exit_with_parent:
        end_with_parent()
    asyncio.run(_serve(settings, service, behaviour))


def _behaviour() -> str | None:
    file = Path("behaviour")
    return file.read_text() if file.exists() else None


async def _serve(settings: Any, service: str, behaviour: str | None) -> None:
    server = Server(settings, service, reuse_port=service == "frontend")
    engine = SchedulerService(settings.scheduler_address) if service == "scheduler" else None
    if service == "frontend":
        frontend_pb2_grpc.add_InferenceServiceServicer_to_server(InferenceService(), server.grpc)
        await server.start(f"{settings.host}:{settings.port}")
    elif service == "scheduler":
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(engine, server.grpc)
        await server.start(settings.scheduler_address)
    else:
        await server.start(settings.worker_addresses[settings.rank])
    if behaviour == "silent":
        threading.Event().wait()
    if behaviour == "stuck":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        await asyncio.Event().wait()
    await server.set_serving(True)
    await server.wait()
    if engine:
        structlog.get_logger().info("gone", listed=engine.listed)
