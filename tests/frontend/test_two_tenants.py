"""Effects of one client on another, with a frontend, the real scheduler and a fake worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc import aio

from deploy.ports import free_port
from frontend.service import Frontend
from frontend.settings import FrontendSettings
from nano_vllm_grpc.pb import frontend_pb2 as pb
from nano_vllm_grpc.pb.frontend_pb2_grpc import InferenceServiceStub
from scheduler_svc import __main__ as scheduler_service
from scheduler_svc.grammar.host_link import HostLink
from scheduler_svc.settings import SchedulerSettings
from shared.pb import scheduler_pb2
from shared.pb.scheduler_pb2_grpc import SchedulerServiceStub
from tests.fake_worker import FakeWorker, start_worker
from tests.frontend.conftest import DEMO, bearer, detail, failure

ACME, WEB, SMALL = "acme-token-0123456789", "web-token-01234567890", "small-token-0123456789"
NEW_ACME, PUBLIC = "acme-token-new-0123456789", "public-token-0123456789"
TOKENS = f"""
{ACME} name=acme
{NEW_ACME} name=acme
{WEB} name=web
{SMALL} name=small input_tokens_per_minute=60
{PUBLIC} name=public cache=shared
"""
TIMEOUT_S = 60


@dataclass
class Stack:
    stub: Any
    worker: FakeWorker
    scheduler: Any  # a stub

    def ask(self, token: str, prompt: list[int], max_tokens: int = 3, **fields: Any) -> Any:
        """Starts a stream."""
        sampling = pb.SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=sampling, **fields)
        return self.stub.GenerateStream(request, metadata=bearer(token), timeout=TIMEOUT_S)

    async def usage(self, token: str, prompt: list[int], **fields: Any) -> pb.Usage:
        responses = [response async for response in self.ask(token, prompt, **fields)]
        return responses[-1].usage


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    (tmp_path / "tokens").write_text(TOKENS)
    worker = FakeWorker()
    worker_server, worker_address = await start_worker(worker)
    address = f"unix:{tmp_path}/s.sock"
    scheduler_settings = SchedulerSettings(
        scheduler_address=address,
        worker_addresses=(worker_address,),
        max_num_seqs=2,
        max_num_batched_tokens=32,
        max_waiting=16,
    )
    settings = FrontendSettings(
        model=str(DEMO),
        port=free_port(),
        scheduler_address=address,
        drain_timeout_s=0.2,
        auth_tokens_file=str(tmp_path / "tokens"),
        max_requests_per_client=12,
    )
    served = Frontend(settings)
    link = HostLink.create()  # with nobody at its other end
    scheduler = asyncio.create_task(scheduler_service.serve(scheduler_settings, link=link))
    frontend = asyncio.create_task(served.serve())
    async with (
        aio.insecure_channel(f"127.0.0.1:{settings.port}") as channel,
        aio.insecure_channel(address) as inner,
    ):
        stack = Stack(InferenceServiceStub(channel), worker, SchedulerServiceStub(inner))
        while not await _answers(stack):
            pass
        yield stack
    served.server.stop()
    await frontend
    scheduler.cancel()
    await asyncio.gather(scheduler, return_exceptions=True)
    link.close()
    await worker_server.stop(None)
    assert not worker.violations


async def _answers(stack: Stack) -> bool:
    try:
        await stack.usage(WEB, [1])
    except aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.UNAVAILABLE  # noqa: PT017
        return False
    return True


async def test_a_clients_prompts_do_not_show_in_another_clients_usage(stack: Stack) -> None:
    prompt = list(range(1, 41))

    async def cached(token: str, **fields: Any) -> int:
        return (await stack.usage(token, prompt, **fields)).cached_prompt_tokens

    assert await cached(ACME) == 0
    assert await cached(ACME) > 0  # one's own are found
    assert await cached(NEW_ACME) > 0  # with another token of the same client, too
    assert await cached(WEB) == 0
    assert await cached(WEB, cache_salt="acme:") == 0
    assert await cached(PUBLIC) == 0
    assert await cached(PUBLIC, cache_salt="acme:") == 0
    assert await cached(PUBLIC, cache_salt="acme") == 0


async def test_a_flood_neither_delays_nor_excludes_another_client(stack: Stack) -> None:
    served: list[str] = []
    rejected: asyncio.Queue[str] = asyncio.Queue()

    async def run(token: str, number: int) -> None:
        try:
            await stack.usage(token, [number, 1, 2], max_tokens=50)
        except aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # noqa: PT017
            rejected.put_nowait(token)
        else:
            served.append(token)

    async def waiting() -> int:
        load: scheduler_pb2.GetLoadResponse = await stack.scheduler.GetLoad(
            scheduler_pb2.GetLoadRequest()
        )
        return load.waiting

    stack.worker.gate.clear()
    flood = [asyncio.create_task(run(ACME, number)) for number in range(40)]
    # It may have 12 requests, of which two run.
    while await waiting() < 10 or rejected.qsize() < 28:
        pass
    other = asyncio.create_task(run(WEB, 200))
    while await waiting() < 11:
        pass
    stack.worker.gate.set()
    await asyncio.wait_for(asyncio.gather(other, *flood), TIMEOUT_S)
    # It came behind ten, waited for the two that ran, and then ran beside a third.
    assert served.index(WEB) <= 3
    assert {rejected.get_nowait() for _ in range(rejected.qsize())} == {ACME}


async def test_a_client_without_tokens_left_learns_when_to_retry(stack: Stack) -> None:
    usage = await stack.usage(SMALL, [7] * 80)
    assert usage.prompt_tokens == 80
    error = await failure(stack.usage(SMALL, [7]))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "input_tokens_per_minute: all 60 tokens are spent" in str(error.details())
    retry = detail(error, error_details_pb2.RetryInfo)
    assert 0 < retry.retry_delay.ToTimedelta().total_seconds() <= 20
    assert (await stack.usage(WEB, [7] * 80)).completion_tokens == 3
