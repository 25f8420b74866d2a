"""A scheduler service over real gRPC, with fake workers below and raw frontends above."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from scheduler_svc.__main__ import serve
from scheduler_svc.block_records import BlockRecords
from scheduler_svc.grammar.host_link import HostLink
from scheduler_svc.settings import SchedulerSettings
from shared.config import load_settings
from shared.pb import scheduler_pb2
from shared.pb.scheduler_pb2_grpc import SchedulerServiceStub
from tests.fake_worker import FakeWorker, completion, start_worker

if TYPE_CHECKING:
    from shared.pb.scheduler_pb2_grpc import SchedulerServiceAsyncStub


Row = tuple[list[int], list[float]]


class Frontend:
    """Speaks the frontend's side of one stream and collects what arrives."""

    def __init__(self, stub: SchedulerServiceAsyncStub, *, alone: bool = False) -> None:
        self._call = stub.ConnectAlone() if alone else stub.Connect()
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.started: dict[int, scheduler_pb2.Started] = {}
        self.finished: dict[int, scheduler_pb2.Finished] = {}
        self.embeddings: dict[int, list[float]] = {}
        self.info = scheduler_pb2.EngineInfo()
        self.states: list[bool] = []
        self.draining = False
        # By request and position: ids and values.
        self.logprobs: dict[int, dict[int, Row]] = defaultdict(dict)
        self.prompt_logprobs: dict[int, dict[int, Row]] = defaultdict(dict)

    async def connect(self) -> Frontend:
        self.info = (await self._call.read()).engine_info
        return self

    async def submit(
        self,
        request: int,
        prompt: Sequence[int],
        max_tokens: int = 5,
        sampling: scheduler_pb2.TokenSampling | None = None,
        **fields: object,
    ) -> None:
        sampling = sampling or scheduler_pb2.TokenSampling(max_tokens=max_tokens)
        submit = scheduler_pb2.Submit(
            request=request,
            prompt_ids=np.array(prompt, "<i4").tobytes(),
            sampling=sampling,
            **fields,  # type: ignore[arg-type]
        )
        await self._call.write(scheduler_pb2.FrontendMessage(submit=submit))

    async def abort(self, request: int) -> None:
        message = scheduler_pb2.FrontendMessage(abort=scheduler_pb2.Abort(request=request))
        await self._call.write(message)

    async def read(self) -> None:
        """Takes in the next message; every token must arrive in order."""
        message = await self._call.read()
        assert isinstance(message, scheduler_pb2.SchedulerMessage), await self._call.details()
        if message.HasField("engine_state"):
            self.states.append(message.engine_state.serving)
        output = message.step_output
        columns = (
            np.frombuffer(output.requests, "<u8").tolist(),
            np.frombuffer(output.offsets, "<i4").tolist(),
            np.frombuffer(output.token_ids, "<i4").tolist(),
        )
        for request, offset, token in zip(*columns, strict=True):
            assert offset == len(self.tokens[request])
            self.tokens[request].append(token)
        for rows in output.logprobs:
            ids = np.frombuffer(rows.token_ids, "<i4").reshape(-1, rows.width).tolist()
            values = np.frombuffer(rows.values, "<f4").reshape(-1, rows.width).tolist()
            found = self.prompt_logprobs if rows.prompt else self.logprobs
            for i, row in enumerate(zip(ids, values, strict=True)):
                assert rows.first + i not in found[rows.request], "delivered twice"
                found[rows.request][rows.first + i] = row
        for each in output.embeddings:
            assert len(self.tokens[each.request]) == 1
            assert each.request not in self.embeddings
            self.embeddings[each.request] = np.frombuffer(each.values, "<f4").tolist()
        for started in output.started:
            assert started.request not in self.started
            assert self.tokens[started.request]
            self.started[started.request] = started
        for finished in output.finished:
            assert finished.request not in self.finished
            self.finished[finished.request] = finished

    async def read_until_finished(self, *requests: int) -> None:
        while not self.finished.keys() >= set(requests):
            await self.read()

    async def expect(self, request: int, prompt: Sequence[int], max_tokens: int) -> None:
        """Reads until a request has ended with the oracle's tokens."""
        await self.read_until_finished(request)
        assert self.tokens[request] == completion(prompt, max_tokens)

    async def complete(self, request: int, prompt: Sequence[int], max_tokens: int) -> None:
        await self.submit(request, prompt, max_tokens)
        await self.expect(request, prompt, max_tokens)

    async def half_close(self) -> None:
        await self._call.done_writing()

    async def failure(self) -> aio.AioRpcError:
        """Reads until the scheduler has ended the stream with an error."""
        with pytest.raises(aio.AioRpcError) as raised:
            await self._read_on()
        return raised.value

    async def _read_on(self) -> None:
        while True:
            message: Any = await self._call.read()
            assert message.WhichOneof("message") in ("engine_state", "step_output")
            self.draining |= message.engine_state.draining

    def close(self) -> None:
        self._call.cancel()


class Stack:
    def __init__(self, address: str) -> None:
        self.address = address
        # A channel of its own connects anew, though another server may have had the address.
        options = (("grpc.use_local_subchannel_pool", 1),)
        self.channel = aio.insecure_channel(address, options)
        self.stub: SchedulerServiceAsyncStub = SchedulerServiceStub(self.channel)

    async def frontend(self, *, alone: bool = False) -> Frontend:
        return await Frontend(self.stub, alone=alone).connect()

    async def load(self) -> scheduler_pb2.GetLoadResponse:
        return await self.stub.GetLoad(scheduler_pb2.GetLoadRequest(), wait_for_ready=True)

    async def serving(self) -> bool:
        health = health_pb2_grpc.HealthStub(self.channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def until(self, condition: Callable[[scheduler_pb2.GetLoadResponse], bool]) -> None:
        while not condition(await self.load()):
            pass


@asynccontextmanager
async def running(
    settings: SchedulerSettings, records: BlockRecords | None = None
) -> AsyncIterator[Stack]:
    link = HostLink.create()  # with nobody at its other end
    task = asyncio.create_task(serve(settings, link=link, records=records))
    stack = Stack(settings.scheduler_address)
    try:
        yield stack
    finally:
        await stack.channel.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        link.close()


def settings_for(tmp_path: Path, addresses: list[str], **values: object) -> SchedulerSettings:
    flags = {
        "scheduler_address": f"unix:{tmp_path}/s.sock",
        "worker_addresses": ",".join(addresses),
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        **values,
    }
    args = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    return load_settings(SchedulerSettings, args)


@asynccontextmanager
async def stack_of(tmp_path: Path, *workers: FakeWorker, **values: object) -> AsyncIterator[Stack]:
    servers, addresses = zip(*[await start_worker(w) for w in workers], strict=True)
    try:
        async with running(settings_for(tmp_path, list(addresses), **values)) as stack:
            yield stack
    finally:
        for server in servers:
            await server.stop(None)
    assert not any(worker.violations for worker in workers)
