"""`python -m worker_svc`: one tensor-parallel rank."""

from __future__ import annotations

import os

# torch and numba have a pool of threads each. By default the threads of one spin for a while after
# its work is done, on the cores that the other wants: with two cores a step took twice as long.
# OpenMP reads this once, when it is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import asyncio
import sys

import structlog

from shared.config import WorkerSettings, settings_or_exit
from shared.logging import configure_logging
from shared.pb.worker_pb2_grpc import add_WorkerServiceServicer_to_server
from shared.server import Server, exit_with_parent
from worker_svc.errors import StartError
from worker_svc.server import WorkerService

log = structlog.get_logger(__name__)

SERVICE_NAME = "nanovllm.worker.v1.WorkerService"


async def serve(settings: WorkerSettings) -> None:
    """Serves until SIGTERM; healthy once the model is loaded and warm."""
    server = Server(settings, SERVICE_NAME)
    service = WorkerService(settings)
    add_WorkerServiceServicer_to_server(service, server.grpc)
    await server.start(settings.worker_addresses[settings.rank])
    try:
        await service.load()
        await server.set_serving(True)
        await server.wait()
    finally:
        await server.grpc.stop(None)
        service.close()


def main() -> None:
    settings = settings_or_exit(WorkerSettings, sys.argv[1:])
    configure_logging(settings, "worker", rank=settings.rank)
    if settings.exit_with_parent:
        exit_with_parent()
    try:
        asyncio.run(serve(settings))
    except (StartError, OSError) as error:
        log.error("cannot start", reason=str(error))
        sys.exit(2)


if __name__ == "__main__":
    main()
