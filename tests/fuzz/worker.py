"""The interface of a worker with a small model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from grpc import aio

import worker_svc.__main__ as worker_main
from shared.pb import worker_pb2 as pb
from shared.pb.worker_pb2_grpc import WorkerServiceStub
from tests.fuzz.corpus import Case
from tests.fuzz.harness import Interface, Shares, drawing
from tests.fuzz.tally import DEADLINE_S, Tally, send, wait_serving
from tests.fuzz.transport import transport
from tests.worker_svc.harness import Asked, Batch, limits, save_model, worker_settings

SERVICE = worker_main.SERVICE_NAME
_VOCAB_SIZE = 301
_NUM_BLOCKS = 64


@dataclass
class Target:
    """A worker in this process, and how far its steps have come."""

    address: str
    channel: aio.Channel
    epoch: int = 0
    next_step: int = 1
    call: Any = None  # the stream of hostile steps

    @property
    def stub(self) -> Any:
        return WorkerServiceStub(self.channel)

    async def configure(self) -> None:
        """Begins a new epoch, whatever came before."""
        if self.call is not None:
            self.call.cancel()
            self.call = None
        info = await self.stub.GetInfo(pb.GetInfoRequest(), timeout=DEADLINE_S)
        self.epoch, self.next_step = info.epoch + 1, 1
        request = pb.ConfigureRequest(
            epoch=self.epoch,
            num_blocks=_NUM_BLOCKS,
            max_num_seqs=8,
            max_num_batched_tokens=128,
        )
        await self.stub.Configure(request, timeout=DEADLINE_S)

    def execute(self) -> Any:
        return self.channel.stream_stream(f"/{SERVICE}/Execute")(timeout=DEADLINE_S)

    def due(self, message: bytes) -> bytes:
        """Turns most messages into the next step of the epoch: of fields that occur twice, the last
        one counts."""
        due = pb.StepRequest(epoch=self.epoch, step_id=self.next_step)
        return message + due.SerializeToString() if len(message) % 4 else message


@asynccontextmanager
async def running_worker(directory: Path) -> AsyncIterator[list[Interface]]:
    """Runs a worker with a random model on a Unix socket in `directory`."""
    save_model(directory / "model")
    address = f"unix:{directory}/w"
    settings = worker_settings(
        directory / "model",
        worker_addresses=(address,),
        max_num_seqs=8,
        max_num_batched_tokens=128,
        kv_blocks=_NUM_BLOCKS,
        max_message_bytes=1 << 18,
        hang_timeout_s=600,  # drawing messages blocks the same event loop
    )
    serving = asyncio.create_task(worker_main.serve(settings))
    try:
        async with aio.insecure_channel(address) as channel:
            await wait_serving(channel, SERVICE)
            target = Target(address, channel)
            await target.configure()

            async def rest(_: Tally) -> None:
                await target.configure()

            send_case, honest = partial(_send, target), partial(_valid_step, target)
            yield [
                Interface("worker", drawing(_shares()), send_case, honest, rest, at_once=1),
                transport(address, SERVICE, "GetInfo", honest, rest),
            ]
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


def _shares() -> Shares:
    configure = pb.ConfigureRequest(
        epoch=1, num_blocks=_NUM_BLOCKS, max_num_seqs=8, max_num_batched_tokens=128
    )
    return [
        ("GetInfo", [pb.GetInfoRequest()], 1),
        ("Configure", [configure], 4),
        ("Execute", examples(), 75),
    ]


async def _send(target: Target, case: Case, tally: Tally) -> None:
    """Sends a case's messages; steps share a stream until one of them ends it."""
    for message in case.messages:
        if case.method != "Execute":
            if case.method == "Configure" and len(message) % 2:
                message += pb.ConfigureRequest(epoch=target.epoch + 1).SerializeToString()
            await send(target.channel, f"/{SERVICE}/{case.method}", message, tally, case)
            if case.method == "Configure":  # it may have begun a new epoch
                await target.configure()
            continue
        target.call = target.call or target.execute()
        try:
            if await _step(target, target.call, target.due(message), tally):
                tally.status(case, None)
                continue
            tally.problem("the stream ended without a reason", case)
        except aio.AioRpcError as error:
            tally.status(case, error)
        target.call = None


async def _step(target: Target, call: Any, message: bytes, tally: Tally) -> list[int] | None:
    """Returns the tokens that the last step of a message samples, -1 for rows that sample none;
    None if the stream ends."""
    try:
        await call.write(message)
    except asyncio.InvalidStateError:
        return None
    tokens = [-1]
    for _ in range(_num_answers(target, message)):
        data = await call.read()
        if not isinstance(data, bytes):
            return None
        target.next_step += 1
        tokens = np.frombuffer(pb.StepResponse.FromString(data).token_ids, "<i4").tolist()
        if not tokens or not all(-1 <= token < _VOCAB_SIZE for token in tokens):
            tally.problem(f"sampled {tokens}", message)
    return tokens


def _num_answers(target: Target, message: bytes) -> int:
    """How many answers a message gets, if it does not end the stream."""
    try:
        request = pb.StepRequest.FromString(message)
    except DecodeError:
        return 1
    if request.cut and request.epoch == target.epoch:
        return 0
    return max(request.num_steps, 1)


async def _valid_step(target: Target) -> list[int] | None:
    """Returns the tokens of a valid step in an epoch of its own, or None if it fails."""
    await target.configure()
    batch = Batch(limits(num_blocks=_NUM_BLOCKS), step_id=target.next_step - 1, epoch=target.epoch)
    request = batch.request([(0, [1, 2, 3]), (1, [7, 8])], temperatures=[0, 0.8], seeds=[0, 3])
    call = target.execute()
    try:
        return await _step(target, call, request.SerializeToString(), Tally())
    except aio.AioRpcError:
        return None
    finally:
        call.cancel()
        await target.configure()


def examples() -> list[pb.StepRequest]:
    """Valid first steps of epoch 1."""

    def step(*args: Any, **kwargs: Any) -> pb.StepRequest:
        return Batch(limits(num_blocks=_NUM_BLOCKS)).request(*args, **kwargs)

    prompts = [(0, [1, 2, 3]), (1, list(range(40))), (2, [9])]
    every = Asked(
        top_k=4,
        top_p=0.8,
        min_p=0.1,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        prompt_len=2,
        logprobs=3,
        bias={5: 1.5, 6: -2.0},
        allowed=range(100),
    )
    run = step([(0, [1]), (1, [2])], features={0: Asked(logprobs=2)})
    run.num_steps = 4
    return [
        run,
        step(prompts),
        step(prompts, silent=[1], temperatures=[0.5, 1, 0], seeds=[1, 2, 3]),
        step(prompts, temperatures=[0.5, 1, 0], features={0: every, 1: Asked(allowed=[3, 4])}),
        step(prompts, features={2: Asked(logprobs=0, frequency_penalty=1.0, prompt_len=1)}),
        step(prompts, targets={0: [2, 3], 1: list(range(1, 40))}, num_prompt_logprobs=2),
        step(prompts, copies=[(60, 61), (60, 62)]),
    ]
