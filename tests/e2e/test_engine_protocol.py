"""vLLM's engine protocol of a real stack: events of the cache, loads, and profiles of its
workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from deploy.ports import free_port
from nano_vllm_grpc import LLM, SamplingParams
from tests.stack import RealStack, UnmetPreconditionError, running_stack

BLOCK = 16
TOKEN = "an-operators-token"
OPERATOR = (("authorization", f"Bearer {TOKEN}"),)
GREEDY = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RealStack, Any]]:
    """A stack of two ranks with a small cache, and a client of its engine protocol."""
    tokens = tmp_path_factory.mktemp("tokens") / "operators"
    tokens.write_text(f"{TOKEN}\n")
    address = f"127.0.0.1:{free_port()}"
    with (
        running_stack(
            tp=2,
            gateway_addresses=address,
            operator_tokens_file=tokens,
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
        self.number = self.times_cleared = 0
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
                self.times_cleared += 1
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
    return stub.SubscribeKvEvents(request, metadata=OPERATOR)


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


def test_flushing_empties_the_cache_when_nothing_runs(stack: tuple[RealStack, Any]) -> None:
    running, stub = stack
    prompt = list(range(300, 350))
    with LLM(running.address) as llm:
        cache = Cache(subscribe(stub))
        stream = llm.stream(prompt, SamplingParams(max_tokens=300, ignore_eos=True))
        next(stream)
        running.stop("worker", 1)
        load = running.load()
        flushed = stub.FlushCache(common.FlushCacheRequest(), metadata=OPERATOR)
        running.cont("worker", 1)
        if not load.running:
            raise UnmetPreconditionError("the stream has ended")
        assert (flushed.success, flushed.message) == (False, "requests are in progress")
        flushed = stub.FlushCache(common.FlushCacheRequest(timeout_s=60), metadata=OPERATOR)
        assert flushed.success
        list(stream)
        (completion,) = llm.generate([prompt], SamplingParams(max_tokens=1))
    assert completion["usage"]["cached_prompt_tokens"] == 0
    # The snapshot has cleared it, too.
    cache.apply_until(lambda: cache.times_cleared >= 2 and cache.has(prompt[32:48]))
    assert {tokens for _, tokens in cache.blocks.values()} == {
        tuple(prompt[i : i + BLOCK]) for i in range(0, 48, BLOCK)
    }
    cache.call.cancel()


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


def start_profile(stub: Any, **fields: Any) -> list[Path]:
    """-> the traces that will be written."""
    request = common.StartProfileRequest(**fields)
    return traces(stub.StartProfile(request, metadata=OPERATOR), "recording")


def stop_profile(stub: Any) -> list[Path]:
    """-> the traces that were written."""
    return traces(stub.StopProfile(common.StopProfileRequest(), metadata=OPERATOR), "wrote")


def traces(response: Any, verb: str) -> list[Path]:
    assert response.success
    first, *paths = response.message.replace(",", "").split()
    assert first == verb
    return [Path(path) for path in paths]


def generate(running: RealStack) -> list[list[int]]:
    with LLM(running.address) as llm:
        outputs = llm.generate(["Once upon a time", "What is 3 + 4?"], GREEDY, use_tqdm=False)
    return [output["token_ids"] for output in outputs]


def test_every_rank_leaves_a_trace_and_no_token_changes(stack: tuple[RealStack, Any]) -> None:
    running, stub = stack
    expected = generate(running)
    started = start_profile(stub)
    assert generate(running) == expected
    stopped = stop_profile(stub)
    assert stopped == started
    assert {path.parent for path in stopped} == {running.stack.directory / "profiles"}
    for rank, trace in enumerate(stopped):
        assert trace.name.startswith(f"rank-{rank}-")
        assert trace.stat().st_size
    assert generate(running) == expected


def test_a_worker_takes_its_profile_with_it(stack: tuple[RealStack, Any]) -> None:
    running, stub = stack
    expected = generate(running)
    start_profile(stub)
    running.kill("worker", 1)
    assert generate(running) == expected
    with pytest.raises(grpc.RpcError) as refused:  # by the rank that still records
        start_profile(stub)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert refused.value.details() == "a profile is in progress: StopProfile ends it"
    (trace,) = stop_profile(stub)
    assert trace.name.startswith("rank-0-")
    assert len(start_profile(stub, num_steps=3)) == 2
    assert generate(running) == expected
    assert len(stop_profile(stub)) == 2
    running.wait_serving()
