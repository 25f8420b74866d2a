"""A worker without a model: real gRPC, the real protocol, tokens that can be computed by hand.

Its cache holds token ids. A sampled token is `next_token` of everything the row attends to, read
back through the block table, so that a wrong slot, position or table gives a wrong token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import grpc
import numpy as np
from grpc import aio

from shared.pb import worker_pb2
from shared.pb.worker_pb2_grpc import WorkerServiceServicer, add_WorkerServiceServicer_to_server

VOCAB_SIZE = 1000


def next_token(context: Sequence[int]) -> int:
    """Depends on every token of the context and on their order."""
    value = len(context)
    for token in context:
        value = (value * 31 + token + 1) % 1_000_003
    return value % VOCAB_SIZE


def completion(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The oracle: what an engine with this worker generates."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class FakeWorker(WorkerServiceServicer):
    """Checks what the protocol promises; a violation ends the step with the reason in `violations`.

    `gate` holds back answers while it is cleared; `fail_steps` step ids end the stream instead.
    """

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        max_model_len: int = 128,
        rank: int = 0,
        world_size: int = 1,
        fingerprint: str = "fake",
    ) -> None:
        self.info = worker_pb2.GetInfoResponse(
            rank=rank,
            world_size=world_size,
            device="cpu",
            dtype="float32",
            model_fingerprint=fingerprint,
            attention_backend="fake",
            block_size=block_size,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE,
            incarnation="fake",
        )
        self.gate = asyncio.Event()
        self.gate.set()
        self.step_arrived = asyncio.Event()
        self.fail_steps: set[int] = set()
        self.always_fail = False
        self.violations: list[str] = []
        self.steps: list[worker_pb2.StepRequest] = []
        self.cache = np.full(0, -1, np.int64)
        self.last_tokens: list[int] = []
        self.limits = worker_pb2.ConfigureRequest()

    async def GetInfo(
        self, request: worker_pb2.GetInfoRequest, context: object
    ) -> worker_pb2.GetInfoResponse:
        return self.info

    async def Configure(
        self, request: worker_pb2.ConfigureRequest, context: object
    ) -> worker_pb2.ConfigureResponse:
        self.info.epoch = request.epoch
        self.limits = request
        self.cache = np.full(request.num_blocks * self.info.block_size, -1, np.int64)
        self.last_tokens = []
        return worker_pb2.ConfigureResponse()

    async def Execute(
        self,
        request_iterator: AsyncIterator[worker_pb2.StepRequest],
        context: aio.ServicerContext[worker_pb2.StepRequest, worker_pb2.StepResponse],
    ) -> AsyncIterator[worker_pb2.StepResponse]:
        expected = 1
        async for step in request_iterator:
            self.steps.append(step)
            self.step_arrived.set()
            await self.gate.wait()
            if step.step_id in self.fail_steps or self.always_fail:
                self.fail_steps.discard(step.step_id)
                await context.abort(grpc.StatusCode.INTERNAL, "planted failure")
            assert (step.epoch, step.step_id) == (self.info.epoch, expected)
            expected += 1
            try:
                token_ids = self.run(step)
            except AssertionError as error:
                self.violations.append(f"step {step.step_id}: {error}")
                raise
            yield worker_pb2.StepResponse(
                step_id=step.step_id, token_ids=np.array(token_ids, "<i4").tobytes()
            )

    def run(self, step: worker_pb2.StepRequest) -> list[int]:
        block_size = self.info.block_size
        input_ids = np.frombuffer(step.input_ids, "<i4").copy()
        positions = np.frombuffer(step.positions, "<i4")
        slots = np.frombuffer(step.slot_mapping, "<i4")
        query_lens = np.frombuffer(step.query_lens, "<i4")
        context_lens = np.frombuffer(step.context_lens, "<i4")
        table = np.frombuffer(step.block_table, "<i4")
        offsets = np.frombuffer(step.block_table_offsets, "<i4")
        samples = np.frombuffer(step.samples, "u1")
        assert 0 < len(query_lens) <= self.limits.max_num_seqs, "number of sequences"
        assert query_lens.min() > 0, "an empty row"
        assert query_lens.sum() == len(input_ids) <= self.limits.max_num_batched_tokens, "tokens"
        assert len(set(slots.tolist())) == len(slots), "a slot is written twice"
        assert context_lens.max() <= self.info.max_model_len, "context length"
        for place in np.flatnonzero(input_ids < 0):
            row = -1 - input_ids[place]
            assert row < len(self.last_tokens), "a row that the step before did not have"
            assert self.last_tokens[row] >= 0, "a row that sampled nothing"
            input_ids[place] = self.last_tokens[row]
        ends = np.cumsum(query_lens)
        token_ids = []
        for row, end in enumerate(ends):
            span = slice(end - query_lens[row], end)
            blocks = table[offsets[row] : offsets[row + 1]]
            context_len = context_lens[row]
            assert len(blocks) == -(-context_len // block_size), "length of the block table"
            expected = np.arange(context_len - query_lens[row], context_len)
            assert (positions[span] == expected).all(), "positions"
            where = blocks[expected // block_size] * block_size + expected % block_size
            assert (slots[span] == where).all(), "slot mapping"
            self.cache[slots[span]] = input_ids[span]
        for row in range(len(query_lens)):
            blocks = table[offsets[row] : offsets[row + 1]]
            everything = np.arange(context_lens[row])
            attended = self.cache[
                blocks[everything // block_size] * block_size + everything % block_size
            ]
            assert (attended >= 0).all(), "attends to a slot that was never written"
            token_ids.append(next_token(attended.tolist()) if samples[row] else -1)
        self.last_tokens = token_ids
        return token_ids


async def start_worker(worker: FakeWorker, address: str = "127.0.0.1:0") -> tuple[aio.Server, str]:
    """A running server and its address."""
    server = aio.server()
    add_WorkerServiceServicer_to_server(worker, server)
    port = server.add_insecure_port(address)
    await server.start()
    return server, f"127.0.0.1:{port}"
