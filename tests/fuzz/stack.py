"""Three services in this process, on a real worker with the demo model, for hostile requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from grpc import aio

import frontend.api.servicer
import frontend.service
import scheduler_svc.__main__ as scheduler_main
import worker_svc.__main__ as worker_main
from deploy.ports import free_port
from frontend.settings import FrontendSettings
from nano_vllm_grpc.pb.frontend_pb2_grpc import InferenceServiceStub
from scheduler_svc.settings import SchedulerSettings
from shared.config import load_settings
from shared.pb.scheduler_pb2 import GetLoadRequest, GetLoadResponse
from shared.pb.scheduler_pb2_grpc import SchedulerServiceStub
from tests.frontend.conftest import DEMO, link_with_qwen3_template
from tests.fuzz.corpus import Case
from tests.fuzz.tally import DEADLINE_S, VALID, Tally, at_rest, wait_serving
from tests.scheduler_svc.grammar.host import TestHost
from worker_svc.settings import WorkerSettings

SERVICE = frontend.api.servicer.SERVICE_NAME
OPERATORS_TOKEN = "operator-0123456789"
_AT_ONCE = 16


@dataclass
class Stack:
    """The services, and clients of two of them."""

    address: str
    channel: aio.Channel
    engine: aio.Channel  # to the frontend's other door
    load_stub: SchedulerServiceStub

    async def completion(self) -> list[int]:
        """Returns the tokens of a valid, greedy request."""
        answer = await InferenceServiceStub(self.channel).Generate(VALID, timeout=DEADLINE_S)
        (completion,) = answer.completions
        return list(completion.token_ids)

    async def load(self) -> GetLoadResponse:
        load: GetLoadResponse = await self.load_stub.GetLoad(GetLoadRequest(), timeout=DEADLINE_S)
        return load


@asynccontextmanager
async def running_stack(directory: Path) -> AsyncIterator[Stack]:
    """Runs a stack so small that completions are short, on Unix sockets in `directory`."""
    worker, scheduler = f"unix:{directory}/w", f"unix:{directory}/s"
    steps = ["--max-num-seqs=8", "--max-num-batched-tokens=64", f"--model={DEMO}"]
    steps.append("--hang-timeout-s=600")  # drawing messages blocks the same event loop
    worker_flags = ["--device=cpu", "--dtype=float32", "--threads=1", "--max-model-len=48"]
    worker_settings = load_settings(
        WorkerSettings, [f"--worker-addresses={worker}", *steps, *worker_flags, "--kv-blocks=32"]
    )
    scheduler_settings = load_settings(
        SchedulerSettings,
        [f"--worker-addresses={worker}", f"--scheduler-address={scheduler}", *steps],
    )
    link_with_qwen3_template(directory)  # which takes all that a chat may have
    operators = directory / "operators"
    operators.write_text(f"{OPERATORS_TOKEN}\n")
    settings = FrontendSettings(
        model=str(directory),
        port=free_port(),
        gateway_addresses=(f"unix:{directory}/e",),
        operator_tokens_file=str(operators),
        scheduler_address=scheduler,
        max_message_bytes=1 << 18,
    )
    server = frontend.service.public_server(settings)
    host = TestHost()
    tasks = [
        asyncio.create_task(worker_main.serve(worker_settings)),
        asyncio.create_task(scheduler_main.serve(scheduler_settings, link=host.link)),
        asyncio.create_task(frontend.service.serve(server, settings)),
    ]
    address = f"{settings.host}:{settings.port}"
    try:
        async with (
            aio.insecure_channel(address) as channel,
            aio.insecure_channel(settings.gateway_address) as engine,
            aio.insecure_channel(scheduler) as to_s,
        ):
            await wait_serving(channel, SERVICE)
            yield Stack(address, channel, engine, SchedulerServiceStub(to_s))
    finally:
        for task in reversed(tasks):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        host.close()


async def send_all(
    stack: Stack, cases: Iterable[Case], send: Callable[[Tally, Case], Awaitable[None]]
) -> Tally:
    """Sends the cases. Valid requests run alongside and must get what they get alone; nothing may
    be left in the end."""
    tally = Tally()
    expected = await stack.completion()
    left = list(cases)

    async def send_some() -> None:
        while left:
            case = left.pop()
            await send(tally, case)
            if len(left) % 50 == 0 and await stack.completion() != expected:
                tally.problem("a valid request got other tokens", case)

    await asyncio.gather(*(send_some() for _ in range(_AT_ONCE)))
    if await stack.completion() != expected:
        tally.problem("a valid request got other tokens", "everything")
    await at_rest(stack.load)
    return tally
