"""A worker without a model: real gRPC, the real protocol, tokens that can be computed by hand, and
every step checked by the sanitizer."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from random import Random

import grpc
from grpc import aio

from shared.paging import Paging
from shared.pb import worker_pb2
from shared.pb.worker_pb2_grpc import WorkerServiceServicer, add_WorkerServiceServicer_to_server
from tests.oracle import VOCAB_SIZE, completion, next_token
from tests.sanitizer import Limits, Sanitizer, SanitizerError
from tests.step_columns import steps_of

Context = aio.ServicerContext[worker_pb2.ConfigureRequest, worker_pb2.ConfigureResponse]

__all__ = ["VOCAB_SIZE", "FakeWorker", "completion", "next_token", "start_worker"]


class FakeWorker(WorkerServiceServicer):
    """A worker that ends the stream at a step the sanitizer refuses, and notes it in `violations`.

    A step whose id is in `fail_steps`, or for which `fails` is true, ends the stream, and part of
    what it writes may be in the cache. Clearing `gate` holds back steps, clearing `may_fail` those
    failures, and clearing `answers_info` answers to GetInfo. The cache outlives its epoch if the
    scheduler asks for it, until `lose_cache`.
    """

    def __init__(
        self,
        num_blocks: int = 64,
        block_size: int = 4,
        max_model_len: int = 128,
        rank: int = 0,
        world_size: int = 1,
        fingerprint: str = "fake",
        num_stages: int = 1,
    ) -> None:
        self.info = worker_pb2.GetInfoResponse(
            rank=rank,
            world_size=world_size,
            num_stages=num_stages,
            device="cpu",
            dtype="float32",
            model_fingerprint=fingerprint,
            attention_backend="fake",
            block_size=block_size,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE,
            incarnation="fake",
            max_num_batched_tokens=2048,
        )
        self.gate = asyncio.Event()
        self.gate.set()
        self.step_arrived = asyncio.Event()
        self.answers_info = asyncio.Event()
        self.answers_info.set()
        self.num_infos = 0
        self.may_fail = asyncio.Event()
        self.may_fail.set()
        self.fail_steps: set[int] = set()
        self.fails: Callable[[worker_pb2.StepRequest], bool] = lambda _: False
        self.violations: list[str] = []
        self.steps: list[worker_pb2.StepRequest] = []
        self.configured: list[worker_pb2.ConfigureRequest] = []
        self.sanitizer: Sanitizer | None = None
        self._answered = 0  # the last step of this epoch that was answered
        self._random = Random(rank)

    def lose_cache(self, cache_id: str = "") -> None:
        """Forgets the cache, and claims to have another one."""
        self.info.cache_id = cache_id

    async def GetInfo(
        self, request: worker_pb2.GetInfoRequest, context: object
    ) -> worker_pb2.GetInfoResponse:
        self.num_infos += 1
        await self.answers_info.wait()
        return self.info

    async def Configure(
        self, request: worker_pb2.ConfigureRequest, context: Context
    ) -> worker_pb2.ConfigureResponse:
        keeps = request.keep_cache_id
        if keeps and keeps != self.info.cache_id:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "there is no such cache")
        self.configured.append(request)
        self.info.epoch = request.epoch
        if keeps:
            assert self.sanitizer is not None
            self.sanitizer.keep(request.epoch, self._answered, self._random)
        else:
            limits = Limits(
                request.max_num_seqs,
                request.max_num_batched_tokens,
                self.info.max_model_len,
                request.graph_tokens,
            )
            paging = Paging(self.info.block_size)
            self.sanitizer = Sanitizer(limits, request.num_blocks, paging, request.epoch)
            self.info.cache_id = uuid.uuid4().hex
        self._answered = 0
        return worker_pb2.ConfigureResponse(cache_id=self.info.cache_id)

    async def Execute(
        self,
        request_iterator: AsyncIterator[worker_pb2.StepRequest],
        context: aio.ServicerContext[worker_pb2.StepRequest, worker_pb2.StepResponse],
    ) -> AsyncIterator[worker_pb2.StepResponse]:
        async for message in request_iterator:
            if message.cut:  # all steps before it have been answered
                continue
            for step in steps_of(message, Paging(self.info.block_size)):
                yield await self._answer(step, context)

    async def _answer(
        self,
        step: worker_pb2.StepRequest,
        context: aio.ServicerContext[worker_pb2.StepRequest, worker_pb2.StepResponse],
    ) -> worker_pb2.StepResponse:
        self.steps.append(step)
        self.step_arrived.set()
        await self.gate.wait()
        fails = step.step_id in self.fail_steps or self.fails(step)
        assert self.sanitizer is not None
        try:
            answer = self.sanitizer.run(step)
        except SanitizerError as error:
            self.violations.append(str(error))
            raise
        if fails:
            await self.may_fail.wait()
            self.fail_steps.discard(step.step_id)
            await context.abort(grpc.StatusCode.INTERNAL, "planted failure")
        self._answered = step.step_id
        return answer


async def start_worker(worker: FakeWorker, address: str = "127.0.0.1:0") -> tuple[aio.Server, str]:
    """Starts a server; returns it and its address."""
    server = aio.server()
    add_WorkerServiceServicer_to_server(worker, server)
    port = server.add_insecure_port(address)
    await server.start()
    return server, f"127.0.0.1:{port}"
