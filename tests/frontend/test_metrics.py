"""A frontend's metrics of the requests that it has served."""

from __future__ import annotations

import pytest
from grpc import aio

from nano_vllm_grpc.pb import frontend_pb2 as pb
from shared.pb import scheduler_pb2
from tests.frontend.conftest import Service
from tests.frontend.fake_scheduler import QUEUE_S


def request(**sampling: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        text="Once upon a time",
        sampling=pb.SamplingParams(**sampling),  # type: ignore[arg-type]
    )


def samples(service: Service) -> dict[str, float]:
    """The numbers by name, and by the value of their own label if they have one."""
    return {
        "/".join([sample.name.removeprefix("nanovllm:"), *[*sample.labels.values()][1:]]): (
            sample.value
        )
        for family in service.metrics.collect()
        for sample in family.samples
    }


async def test_tokens_waits_and_ends_are_counted(service: Service) -> None:
    await service.stub.Generate(request(max_tokens=5, n=2))
    await service.collect(request(max_tokens=4))
    await service.collect(request(max_tokens=100, stop=["upon"]))
    found = samples(service)
    assert found["time_to_first_token_seconds_count"] == 3
    assert found["e2e_request_latency_seconds_count"] == 3
    assert found["e2e_request_latency_seconds_sum"] >= found["time_to_first_token_seconds_sum"] > 0
    assert found["request_queue_time_seconds_count"] == 4  # of completions
    assert found["request_queue_time_seconds_sum"] == 4 * QUEUE_S
    assert found["inter_token_latency_seconds_count"] >= 4 + 4 + 3
    ends = {name: count for name, count in found.items() if name.startswith("request_success")}
    assert ends == {
        "request_success_total/stop": 1,
        "request_success_total/length": 3,
        "request_success_total/abort": 0,
        "request_success_total/error": 0,
    }
    assert found["engines_serving"] == 1
    assert found["client_requests_total//GenerateStream/LENGTH"] == 1
    assert found["client_requests_total//GenerateStream/STOP"] == 1
    assert found["client_completion_tokens_total/"] > 14


async def test_failed_requests_do_not_count_as_aborts(service: Service) -> None:
    service.scheduler.rejection = scheduler_pb2.Finished(
        cause=scheduler_pb2.FINISH_CAUSE_INTERNAL, message="secret"
    )
    with pytest.raises(aio.AioRpcError):
        await service.stub.Generate(request())
    with pytest.raises(aio.AioRpcError):
        await service.stub.Generate(request(temperature=-1.0))
    service.scheduler.rejection = None
    service.scheduler.automatic = False
    call = service.stub.GenerateStream(request())
    await service.scheduler.submits.get()
    await service.scheduler.submits.get()
    call.cancel()
    await service.scheduler.aborts.get()
    found = samples(service)
    assert found["request_success_total/error"] == 1
    assert found["request_success_total/abort"] == 1
    assert found["client_refusals_total//sampling"] == 1


async def test_a_lost_scheduler_is_a_pause(service: Service) -> None:
    assert samples(service)["recovery_seconds_count/scheduler"] == 0
    await service.reconnect()
    assert samples(service)["recovery_seconds_count/scheduler"] == 1
