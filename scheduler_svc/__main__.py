"""`python -m scheduler_svc` runs an engine's scheduler."""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from pathlib import Path

import structlog

from scheduler_svc.block_records import BlockRecords
from scheduler_svc.core.admission import Limits
from scheduler_svc.core.planning.speculation import Speculation
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.engine import Engine
from scheduler_svc.grammar.grammars import Grammars
from scheduler_svc.grammar.host import GrammarHost
from scheduler_svc.grammar.host_link import HostLink
from scheduler_svc.metrics import EngineMetrics
from scheduler_svc.rpc.servicer import SchedulerServicer
from scheduler_svc.rpc.worker_client import WorkerClient
from scheduler_svc.rpc.worker_group import WorkerGroup, WorkerMismatchError
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.step_traces import StepTraces
from shared.config import settings_or_exit
from shared.pb import scheduler_pb2
from shared.pb.scheduler_pb2_grpc import add_SchedulerServiceServicer_to_server
from shared.process.run import Ready, run_service
from shared.rpc.roles import Callers
from shared.rpc.server import Server
from shared.telemetry.tracing import open_tracing

log = structlog.get_logger(__name__)


async def serve(
    settings: SchedulerSettings,
    ready: Ready | None = None,
    *,
    link: HostLink,
    metrics: EngineMetrics | None = None,
    records: BlockRecords | None = None,
) -> None:
    """Serves until a signal arrives.

    Args:
        link: the link to the grammar host, which runs in a process beside this one.
        metrics: the metrics that the engine updates.
        records: what the last scheduler knew about the workers' cache.

    Raises:
        WorkerMismatchError: the workers contradict each other or the settings.
        OSError: the address cannot be bound.
    """
    callers = Callers("frontend", reads=("GetLoad",))
    server = Server(
        settings, "nanovllm.scheduler.v1.SchedulerService", callers=callers, ready=ready
    )
    servicer = SchedulerServicer()
    add_SchedulerServiceServicer_to_server(servicer, server.grpc)
    await server.start(settings.scheduler_address)
    metrics, records = metrics or EngineMetrics(), records or BlockRecords()
    engine = asyncio.create_task(_run_engine(settings, server, servicer, link, metrics, records))

    def on_failed(_: object) -> None:  # the engine only ends by failing
        servicer.fail()
        server.stop()

    engine.add_done_callback(on_failed)
    server.on_stopping(servicer.drain)
    try:
        await server.wait()
        if engine.done():
            engine.result()
    finally:
        engine.cancel()


async def _run_engine(
    settings: SchedulerSettings,
    server: Server,
    servicer: SchedulerServicer,
    link: HostLink,
    metrics: EngineMetrics,
    records: BlockRecords,
) -> None:
    workers = WorkerClient(settings, metrics, records)

    async def on_serving(serving: bool) -> None:
        metrics.serving = serving
        servicer.set_serving(serving)
        await server.set_serving(serving)

    try:
        group, kept = await workers.connect(keep=True)
        limits = _limits(settings, group)
        blocks = records.block_manager(group.num_blocks, group.paging)
        blocks.tier.is_there = group.has_tier
        if kept:
            log.info("cache of the last scheduler kept", blocks=blocks.num_cached_blocks)
        speculation = _speculation(settings, group)
        scheduler = Scheduler(limits, blocks, speculation, group.num_stages)
        engine = Engine(
            scheduler,
            workers,
            servicer.emit,
            sync=settings.sync,
            grammars=Grammars(link),
            on_serving=on_serving,
            metrics=metrics,
            traces=StepTraces(open_tracing(settings.otlp_endpoint, "scheduler")),
        )
        info = scheduler_pb2.EngineInfo(
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            num_blocks=group.num_blocks,
            block_size=group.paging.block_size,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_waiting=limits.max_waiting,
            tensor_parallel_size=len(settings.worker_addresses) // group.num_stages,
            pipeline_parallel_size=group.num_stages,
            name=settings.engine_name,
            model_fingerprint=group.model_fingerprint,
        )
        await on_serving(True)
        servicer.start(engine, info)
        await engine.run(workers)
    finally:
        await workers.close()


def _speculation(settings: SchedulerSettings, group: WorkerGroup) -> Speculation | None:
    if settings.speculation == "none" or group.num_stages > 1:
        return None
    by_model = settings.speculation not in ("auto", "ngram")
    if by_model and not group.drafts:
        raise WorkerMismatchError("speculation: the workers have no draft model")
    return Speculation(by_model=by_model)


def _limits(settings: SchedulerSettings, group: WorkerGroup) -> Limits:
    return Limits(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=group.max_num_batched_tokens,
        max_model_len=group.paging.longest(group.num_blocks, group.max_model_len),
        max_waiting=settings.max_waiting,
        max_waiting_tokens=settings.max_waiting_tokens,
        max_num_prefill_tokens=(
            max(group.max_num_batched_tokens // 2, 1)
            if settings.max_num_prefill_tokens == "auto"
            else settings.max_num_prefill_tokens
        ),
        vocab_size=group.vocab_size,
    )


def main() -> int:
    settings = settings_or_exit(SchedulerSettings, sys.argv[1:])
    link, metrics, records = HostLink.create(), EngineMetrics(settings.model), BlockRecords()
    return run_service(
        "scheduler",
        settings,
        partial(serve, link=link, metrics=metrics, records=records),
        (WorkerMismatchError,),
        sidecar=GrammarHost(link, Path(settings.model)).run,
        on_fork_ended=records.fork_ended,
        metrics=metrics,
        index=settings.index,
        labels={"engine": settings.engine_name},
    )


if __name__ == "__main__":
    sys.exit(main())
