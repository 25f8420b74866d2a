"""torch's profiler on the workers of a real stack, started and stopped through vLLM's engine
protocol."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from deploy.ports import free_service_port
from frontend.client import LLM, SamplingParams
from tests.stack import RealStack, running_stack

TOKEN = "an-operators-token"
OPERATOR = (("authorization", f"Bearer {TOKEN}"),)
PARAMS = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)


class Profiled:
    """A stack of two ranks, and an operator of it."""

    def __init__(self, running: RealStack, stub: Any) -> None:
        self.running = running
        self._stub = stub

    def start(self, **fields: Any) -> str:
        request = common.StartProfileRequest(**fields)
        return self._succeeded(self._stub.StartProfile(request, metadata=OPERATOR))

    def stop(self) -> str:
        request = common.StopProfileRequest()
        return self._succeeded(self._stub.StopProfile(request, metadata=OPERATOR))

    def _succeeded(self, response: Any) -> str:
        assert response.success
        return str(response.message)

    def generate(self) -> list[list[int]]:
        with LLM(self.running.address) as llm:
            outputs = llm.generate(["Once upon a time", "What is 3 + 4?"], PARAMS, use_tqdm=False)
        return [output["token_ids"] for output in outputs]


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Profiled]:
    tokens = tmp_path_factory.mktemp("tokens") / "operators"
    tokens.write_text(f"{TOKEN}\n")
    address = f"127.0.0.1:{free_service_port()}"
    with (
        running_stack(tp=2, engine_addresses=address, operator_tokens_file=tokens) as running,
        grpc.insecure_channel(address) as channel,
    ):
        yield Profiled(running, VllmEngineStub(channel))  # type: ignore[no-untyped-call]


def traces(message: str, verb: str) -> list[Path]:
    first, *paths = message.replace(",", "").split()
    assert first == verb
    return [Path(path) for path in paths]


def names_in(trace: Path) -> set[str]:
    with gzip.open(trace) as file:
        return {event["name"] for event in json.load(file)["traceEvents"]}


def test_every_rank_leaves_a_trace_and_no_token_changes(profiled: Profiled) -> None:
    expected = profiled.generate()
    started = traces(profiled.start(with_stack=True), "recording")
    assert profiled.generate() == expected
    stopped = traces(profiled.stop(), "wrote")
    assert stopped == started
    assert {path.parent for path in stopped} == {profiled.running.stack.directory / "profiles"}
    for rank, trace in enumerate(stopped):
        assert trace.name.startswith(f"rank-{rank}-")
        names = names_in(trace)
        assert "aten::copy_" in names
        assert any("worker_svc/models/qwen3.py" in name for name in names)
    assert profiled.generate() == expected


def test_a_worker_takes_its_profile_with_it(profiled: Profiled) -> None:
    expected = profiled.generate()
    profiled.start()
    profiled.running.kill("worker", 1)
    assert profiled.generate() == expected
    with pytest.raises(grpc.RpcError) as refused:  # by the rank that still records
        profiled.start()
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert refused.value.details() == "a profile is in progress: StopProfile ends it"
    (trace,) = traces(profiled.stop(), "wrote")
    assert trace.name.startswith("rank-0-")
    assert len(traces(profiled.start(num_steps=3), "recording")) == 2
    assert profiled.generate() == expected
    assert len(traces(profiled.stop(), "wrote")) == 2
    profiled.running.wait_serving()


def test_the_workers_refusals_reach_the_operator(profiled: Profiled) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        profiled.start(activities=["TPU"])
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details() == "activities: TPU; known: CPU, GPU, MEM"
    with pytest.raises(grpc.RpcError) as refused:
        profiled.stop()
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert refused.value.details() == "no profile is in progress"
