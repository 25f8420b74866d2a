"""Calls that arrive while the only engine recovers, over real gRPC."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from frontend.settings import FrontendSettings
from nano_vllm_grpc.pb import frontend_pb2 as pb
from tests.frontend.conftest import Service, rejection
from tests.frontend.fake_scheduler import QUEUE_S
from tests.waiting import until


@pytest.fixture
def settings(settings: FrontendSettings, request: pytest.FixtureRequest) -> FrontendSettings:
    """`request.param`: more of them."""
    return settings.model_copy(update=getattr(request, "param", {}))


def message(**sampling: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="Once", sampling=pb.SamplingParams(max_tokens=3, **sampling))


async def test_calls_wait_for_the_engine_and_report_the_wait(service: Service) -> None:
    await service.scheduler.stop()
    await service.wait_for_health(False)
    calls = [service.stub.Generate(message()), service.collect(message())]
    whole, streamed = (asyncio.ensure_future(call) for call in calls)
    late = service.stub.Generate(message(), timeout=0.2)
    code, _ = await rejection(late)
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    left = service.stub.Generate(message())
    left.cancel()
    await service.scheduler.start()
    await service.wait_for_health(True)
    response, chunks = await whole, await streamed
    (completion,) = response.completions
    assert len(completion.token_ids) == 3
    assert [id for chunk in chunks for id in chunk.token_ids] == list(completion.token_ids)
    for timings in (response.timings, chunks[-1].timings):
        assert timings.queue_s > QUEUE_S + 0.2
        assert timings.queue_s - QUEUE_S <= timings.first_token_s
    assert service.scheduler.submits.qsize() == 2


@pytest.mark.parametrize("settings", [{"max_requests_per_client": 2}], indirect=True)
async def test_waiting_calls_count_as_the_clients_requests(service: Service) -> None:
    await service.scheduler.stop()
    await service.wait_for_health(False)
    calls = {asyncio.ensure_future(service.collect(message())) for _ in range(3)}
    (rejected,), waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    code, reason = await rejection(rejected)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert reason.startswith("max_requests_per_client: 2 ")
    await service.scheduler.start()
    for call in waiting:
        assert await call


async def test_a_frontend_that_drains_does_not_wait_for_its_engine_beyond_the_grace_period(
    service: Service,
) -> None:
    await service.scheduler.stop()
    await service.wait_for_health(False)
    call = service.stub.Generate(message())
    await until(lambda: service.server.calls.count > 0, "the call to arrive")
    service.server.stop()
    code, _ = await rejection(call)
    assert code is grpc.StatusCode.UNAVAILABLE
