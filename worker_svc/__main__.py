"""`python -m worker_svc` runs one tensor-parallel rank."""

from __future__ import annotations

import gc

gc.disable()  # see `shared.process.run`

from worker_svc.devices.openmp import let_threads_spin_briefly

let_threads_spin_briefly()

import sys
from functools import partial

from shared.config import settings_or_exit
from shared.pb.worker_pb2_grpc import add_WorkerServiceServicer_to_server
from shared.process.run import Ready, run_service
from shared.rpc.roles import Callers
from shared.rpc.server import Server
from worker_svc.devices.choice import preload
from worker_svc.errors import StartError
from worker_svc.kept_memory.memory import KeptMemory, kept_version
from worker_svc.metrics import WorkerMetrics
from worker_svc.server import WorkerService
from worker_svc.settings import WorkerSettings

SERVICE_NAME = "nanovllm.worker.v1.WorkerService"


async def serve(
    settings: WorkerSettings,
    ready: Ready | None = None,
    *,
    metrics: WorkerMetrics | None = None,
    memory: KeptMemory | None = None,
) -> None:
    """Serves until SIGTERM. The worker is healthy once the model is loaded and warm.

    Args:
        ready: called once the model has been configured. A failure before that may be permanent.
        memory: see `ModelRunner`.
    """
    server = Server(settings, SERVICE_NAME, callers=Callers("scheduler", reads=("Profile",)))
    service = WorkerService(settings, server.stop, ready, metrics, memory)
    add_WorkerServiceServicer_to_server(service, server.grpc)
    await server.start(settings.worker_addresses[settings.rank])
    try:
        await service.execution.load()
        await server.set_serving(True)
        await server.wait()
        service.check()
    finally:
        await server.grpc.stop(None)
        service.execution.close()
        service.tier.close()


def main() -> int:
    settings = settings_or_exit(WorkerSettings, sys.argv[1:])
    preload(settings.device)
    memory = KeptMemory(kept_version(settings))
    metrics = WorkerMetrics(settings.model)
    return run_service(
        "worker",
        settings,
        partial(serve, metrics=metrics, memory=memory),
        (StartError,),
        on_fork_ended=memory.fork_ended,
        metrics=metrics,
        index=settings.place,
        labels={"engine": settings.engine_name},
        rank=settings.rank,
    )


if __name__ == "__main__":
    sys.exit(main())
