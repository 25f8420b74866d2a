"""Promise 11: an engine is lost, all its processes at once and for good, and its streams continue
at another."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from copy import deepcopy

import grpc
import psutil
import pytest

from deploy.native.processes import start_processes, stop_processes, stopped_processes
from deploy.ports import free_port
from deploy.stack import Process
from nano_vllm_grpc.pb.frontend_pb2 import GenerateRequest, SamplingParams
from nano_vllm_grpc.pb.frontend_pb2_grpc import InferenceServiceStub
from tests.faults.streams import (
    REQUESTS,
    STORY,
    assert_undamaged,
    open_streams,
    undisturbed,
)
from tests.faults.transcript import Transcript
from tests.stack import RealStack, running_stack
from tests.waiting import WAIT_S, wait_for

_HTTP_TOKENS = 160
_STEPS = 15  # so few that streams are open when an engine is lost


@pytest.fixture(scope="module")
def stack_of_module() -> Iterator[RealStack]:
    limits = {"max_num_batched_tokens": 64, "max_num_seqs": 32}
    http = {"http_port": free_port()}
    with running_stack(engines=2, dtype="float32", kv_blocks=1024, **limits, **http) as stack:
        yield stack


@pytest.fixture(scope="module")
def expected(stack_of_module: RealStack) -> dict[str, Transcript]:
    return undisturbed(stack_of_module.address, REQUESTS)


@pytest.fixture
def stack(stack_of_module: RealStack) -> RealStack:
    """The module's stack, at rest also after a test that was given up halfway."""
    stack_of_module.wait_serving()
    stack_of_module.wait_idle()
    return stack_of_module


@contextmanager
def _lost_engine(stack: RealStack, number: int) -> Iterator[None]:
    """Kills all processes of an engine at once; nothing starts them again before the body ends."""
    processes = [each for each in stack.processes() if each.engine == number]
    all_of_it = [each for process in processes for each in _family(stack, process)]
    for each in all_of_it:  # so that none notices what becomes of the others, or of itself
        with suppress(psutil.NoSuchProcess):
            each.suspend()
    names = {each.name for each in processes}
    with ThreadPoolExecutor() as threads:
        stop = threads.submit(stop_processes, stack.stack, names)
        wait_for(lambda: names <= stopped_processes(stack.directory), "the processes to be stopped")
        for each in all_of_it:
            with suppress(psutil.NoSuchProcess):  # it has ended with its parent
                each.kill()
    stop.result()
    try:
        yield
    finally:
        start_processes(stack.stack, names)


def _family(stack: RealStack, process: Process) -> list[psutil.Process]:
    """A service's parent and its forks."""
    parent = psutil.Process(stack.pid(process.service, process.index)).parent()
    assert parent is not None
    return [parent, *parent.children(recursive=True)]


def _generate(stack: RealStack) -> list[int]:
    """A unary call, which takes as long as its whole completion."""
    with grpc.insecure_channel(stack.address) as channel:
        stub = InferenceServiceStub(channel)
        answer = stub.Generate(REQUESTS["seeded"], timeout=WAIT_S)
    return list(answer.completions[0].token_ids)


def _takes_requests(stack: RealStack, engine: str) -> bool:
    request = GenerateRequest(text=STORY, sampling=SamplingParams(max_tokens=1), engine=engine)
    with grpc.insecure_channel(stack.address) as channel, suppress(grpc.RpcError):
        InferenceServiceStub(channel).Generate(request, timeout=WAIT_S)
        return True
    return False


def _over_http(stack: RealStack) -> str:
    """The text of a greedy completion, streamed over HTTP."""
    body = {
        "model": stack.stack.model,
        "prompt": STORY,
        "max_tokens": _HTTP_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    request = urllib.request.Request(
        f"{stack.stack.url}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=WAIT_S) as response:
        events = [line[6:] for line in response if line.startswith(b"data: {")]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def test_its_streams_go_on_at_another(stack: RealStack, expected: dict[str, Transcript]) -> None:
    text = _over_http(stack)
    requests = deepcopy(REQUESTS)
    for number, request in enumerate(requests.values()):  # half of them on each engine
        request.engine = str(number % 2)
    before = stack.load(1).sampled_tokens
    with (
        stack.hold.after(_STEPS),
        ThreadPoolExecutor() as threads,
        open_streams(stack.address, requests) as streams,
    ):
        wholes = [threads.submit(_generate, stack) for _ in range(2)]
        texts = [threads.submit(_over_http, stack) for _ in range(2)]
        wait_for(lambda: stack.load(1).sampled_tokens > before, "the engine to sample")
        with _lost_engine(stack, 1):
            stack.hold.release()
            assert_undamaged(streams.wait_ended(), expected)
            assert [each.result() for each in texts] == [text, text]
            seeded = expected["seeded"].parts[0].token_ids
            assert [each.result() for each in wholes] == [seeded, seeded]
            # With one engine left, everything still runs.
            assert_undamaged(undisturbed(stack.address, REQUESTS), expected)
    stack.wait_serving()
    wait_for(lambda: _takes_requests(stack, "1"), "the frontend to use the engine")
    assert_undamaged(undisturbed(stack.address, requests), expected)


def test_both_in_turn(stack: RealStack, expected: dict[str, Transcript]) -> None:
    """Streams that have moved move on, also to where they were before."""
    with stack.hold.after(_STEPS), open_streams(stack.address, REQUESTS) as streams:
        streams.wait_for_tokens(5)
        for number in (0, 1):
            with _lost_engine(stack, number):
                before = streams.num_tokens
                stack.hold.after(_STEPS)
                streams.wait_for_tokens(before + 5)
            stack.wait_serving()
        stack.hold.release()
        assert_undamaged(streams.wait_ended(), expected)
