"""vLLM's engine protocol of a real stack: events of the cache, loads, and profiles of its
workers."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from deploy.errors import LaunchError
from deploy.native.profile import profile
from deploy.ports import free_port
from nano_vllm_grpc import LLM, SamplingParams
from tests.stack import RealStack, running_stack
from tests.waiting import wait_for

BLOCK = 16
GREEDY = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def stack() -> Iterator[tuple[RealStack, Any]]:
    """A stack of two ranks with a small cache, and a client of its engine protocol."""
    address = f"127.0.0.1:{free_port()}"
    with (
        running_stack(
            tp=2,
            gateway_addresses=address,
            kv_blocks=24,
            block_size=BLOCK,
            max_num_seqs=8,
        ) as running,
        grpc.insecure_channel(address) as channel,
    ):
        yield running, VllmEngineStub(channel)  # type: ignore[no-untyped-call]


class Cache:
    """The prefix cache as a subscriber knows it: the tokens of each block, and what it follows."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.number = 0
        self.loads: list[Any] = []
        while True:
            batch = self.apply()
            if batch.snapshot.index == batch.snapshot.count - 1:
                break

    def apply(self) -> Any:
        batch = next(self.call)
        self.loads.append(batch.load)
        assert batch.sequence_number == self.number + (not batch.load.load_only)
        self.number = batch.sequence_number
        for event in batch.events:
            if event.HasField("cleared"):
                self.blocks.clear()
            for block_hash in event.removed.block_hashes:
                del self.blocks[block_hash]
            parent = None
            if event.stored.HasField("parent_block_hash"):
                parent = event.stored.parent_block_hash
            for block in event.stored.blocks:
                assert block.block_hash not in self.blocks
                assert block.block_size == len(block.token_ids) == BLOCK
                self.blocks[block.block_hash] = (parent, tuple(block.token_ids))
                parent = block.block_hash
        return batch

    def apply_until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            self.apply()

    def has(self, tokens: list[int]) -> bool:
        """Whether a block with these tokens is stored."""
        return any(stored == tuple(tokens) for _, stored in self.blocks.values())


def subscribe(stub: Any, start: int = 0) -> Any:
    request = common.SubscribeKvEventsRequest(start_sequence_number=start)
    return stub.SubscribeKvEvents(request)


def test_a_subscriber_knows_exactly_what_is_cached(stack: tuple[RealStack, Any]) -> None:
    running, stub = stack
    early = Cache(subscribe(stub))
    with LLM(running.address) as llm:
        for start in range(20, 200, 20):  # 24 blocks are far too few for all
            prompts = [list(range(start + i, start + i + 40)) for i in range(6)]
            llm.generate(prompts, SamplingParams(max_tokens=20, temperature=0), use_tqdm=False)
        last = list(range(700, 700 + BLOCK))
        llm.generate([[*last, 5]], SamplingParams(max_tokens=1))
    early.apply_until(lambda: early.has(last))
    late = Cache(subscribe(stub))
    assert early.blocks == late.blocks
    assert len(early.blocks) > 10
    assert any(load.running_requests for load in early.loads)
    # What it says is what a request finds.
    chains = {block: tokens for block, (parent, tokens) in late.blocks.items() if parent is None}
    with LLM(running.address) as llm:
        for tokens in list(chains.values())[:3]:
            (completion,) = llm.generate([[*tokens, 5]], SamplingParams(max_tokens=1))
            assert completion["usage"]["cached_prompt_tokens"] == BLOCK
    for subscriber in (early, late):
        subscriber.call.cancel()


def test_a_sequence_number_of_the_past_is_out_of_range(stack: tuple[RealStack, Any]) -> None:
    _, stub = stack
    with pytest.raises(grpc.RpcError) as caught:
        next(subscribe(stub, start=3))
    assert caught.value.code() is grpc.StatusCode.OUT_OF_RANGE


def test_loads_are_the_engines(stack: tuple[RealStack, Any]) -> None:
    running, stub = stack
    with LLM(running.address) as llm:
        llm.generate([list(range(600, 640))], SamplingParams(max_tokens=5))
    running.wait_idle()
    (load,) = stub.GetLoads(vllm.GetLoadsRequest()).loads
    assert (load.max_total_num_tokens, load.max_running_requests) == (24 * BLOCK, 8)
    assert load.num_running_reqs == load.num_waiting_reqs == load.num_used_tokens == 0
    assert load.gen_throughput > 0


def generate(running: RealStack) -> list[list[int]]:
    with LLM(running.address) as llm:
        outputs = llm.generate(["Once upon a time", "What is 3 + 4?"], GREEDY, use_tqdm=False)
    return [output["token_ids"] for output in outputs]


def test_every_rank_leaves_a_trace_and_no_token_changes(stack: tuple[RealStack, Any]) -> None:
    running, _ = stack
    expected = generate(running)
    directory = running.stack.directory
    with ThreadPoolExecutor() as pool:
        for _ in range(2):
            profiled = pool.submit(profile, directory, 5)
            while not profiled.done():
                assert generate(running) == expected
            assert profiled.result() == 0
    traces = sorted((directory / "profiles").iterdir())
    assert [trace.name[:9] for trace in traces] == ["worker-0-"] * 2 + ["worker-1-"] * 2
    for trace in traces:
        assert gzip.decompress(trace.read_bytes()).count(b'"step ') == 5


def test_a_worker_takes_its_profile_with_it(stack: tuple[RealStack, Any]) -> None:
    running, _ = stack
    expected = generate(running)
    log = running.stack.log("worker-1")
    started = log.read_text().count("profile started") + 1
    with ThreadPoolExecutor() as pool:
        profiled = pool.submit(profile, running.stack.directory, 1000)
        wait_for(lambda: log.read_text().count("profile started") == started, "the profile")
        running.kill("worker", 1)
        with pytest.raises(LaunchError, match="worker-1: "):
            profiled.result()
    assert generate(running) == expected
    running.wait_serving()
