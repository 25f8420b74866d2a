"""The interface of a scheduler whose worker is a fake that checks every step."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from grpc import aio

import scheduler_svc.__main__ as scheduler_main
from scheduler_svc.rpc.frontend_messages import read_sequence
from scheduler_svc.settings import SchedulerSettings
from shared.config import load_settings
from shared.errors import InvalidArgumentError
from shared.pb import scheduler_pb2 as pb
from shared.pb.scheduler_pb2_grpc import SchedulerServiceStub
from shared.rpc.reading import parse_message
from tests.fake_worker import VOCAB_SIZE, FakeWorker, completion, start_worker
from tests.frontend.conftest import DEMO
from tests.fuzz.corpus import Case
from tests.fuzz.harness import Interface
from tests.fuzz.scheduler_messages import EXAMPLES, TOKENS, abort, submit
from tests.fuzz.tally import DEADLINE_S, Tally, at_rest
from tests.fuzz.transport import transport
from tests.fuzz.values import draw_messages
from tests.scheduler_svc.grammar.host import TestHost

SERVICE = "nanovllm.scheduler.v1.SchedulerService"
# How a client ends its stream: after a valid request by a half-close or by leaving, or at once.
_WAYS = ("Connect", "Connect, leaves", "Connect, closes at once", "Connect, leaves at once")
_SENTINEL = (1 << 40) + 1  # a request number that no hostile message is likely to have
_LAST = (1 << 31) - 1  # priority
_MANY_ABORTS = 3_000
_MAX_MESSAGE_BYTES = 1 << 18


@dataclass
class Target:
    """A scheduler in this process."""

    address: str
    worker: FakeWorker
    channel: aio.Channel

    async def load(self) -> pb.GetLoadResponse:
        load: pb.GetLoadResponse = await SchedulerServiceStub(self.channel).GetLoad(
            pb.GetLoadRequest(), timeout=DEADLINE_S, wait_for_ready=True
        )
        return load


@asynccontextmanager
async def running_scheduler(directory: Path) -> AsyncIterator[list[Interface]]:
    """Runs a scheduler on a Unix socket in `directory`."""
    worker = FakeWorker(num_blocks=64, block_size=4, max_model_len=64)
    server, worker_address = await start_worker(worker)
    address = f"unix:{directory}/s"
    # A vocabulary for grammars, as large as the fake worker's.
    (directory / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE}))
    shutil.copy(DEMO / "tokenizer.json", directory)
    addresses = [f"--scheduler-address={address}", f"--worker-addresses={worker_address}"]
    limits = [
        "--max-num-seqs=8",
        "--max-num-batched-tokens=32",
        f"--max-message-bytes={_MAX_MESSAGE_BYTES}",
    ]
    settings = load_settings(SchedulerSettings, [*addresses, *limits, f"--model={directory}"])
    host = TestHost(directory)
    serving = asyncio.create_task(scheduler_main.serve(settings, link=host.link))
    try:
        async with aio.insecure_channel(address) as channel:
            target = Target(address, worker, channel)
            await target.load()

            async def rest(tally: Tally) -> None:
                await at_rest(target.load)
                for violation in worker.violations:
                    tally.problem(f"a step was wrong: {violation}", "everything")

            honest = Witness(target).completes
            yield [
                Interface("scheduler", _draw, partial(_send, target), honest, rest, at_once=4),
                transport(address, SERVICE, "GetLoad", honest, rest),
            ]
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        host.close()
        await server.stop(None)


class Stream:
    """A frontend's `Connect` stream on which anything can be sent. `read` shows what the server
    does with it."""

    def __init__(self, target: Target, tally: Tally) -> None:
        self._call: Any = target.channel.stream_stream(f"/{SERVICE}/Connect")()
        self._tally = tally
        self._sent: list[bytes] = []
        self.tokens: dict[int, list[int]] = {}

    async def send(self, *messages: bytes) -> None:
        for message in messages:
            self._sent.append(message)
            with suppress(asyncio.InvalidStateError, aio.AioRpcError):  # it has already ended
                await self._call.write(message)

    async def half_close(self) -> None:
        with suppress(asyncio.InvalidStateError, aio.AioRpcError):
            await self._call.done_writing()

    async def read(self) -> pb.SchedulerMessage | None:
        """Reads a message; None if the server has ended the stream without an error.

        Raises:
            AioRpcError: the server has ended the stream with an error.
        """
        data = await self._call.read()
        return pb.SchedulerMessage.FromString(data) if isinstance(data, bytes) else None

    async def finish(self, request: int) -> None:
        """Reads on until `request` has ended, or the stream has.

        Raises:
            AioRpcError: see `read`.
            TimeoutError: neither has within `DEADLINE_S`.
        """
        async with asyncio.timeout(DEADLINE_S):
            while (message := await self.read()) is not None and self._take(message, request):
                pass

    def _take(self, message: pb.SchedulerMessage, request: int) -> bool:
        """Applies a message. Returns whether `request` continues."""
        output = message.step_output
        numbers = np.frombuffer(output.requests, "<u8").tolist()
        ids = np.frombuffer(output.token_ids, "<i4").tolist()
        for number, token in zip(numbers, ids, strict=True):
            self.tokens.setdefault(number, []).append(token)
        for finished in output.finished:
            self._count(finished)
        return all(finished.request != request for finished in output.finished)

    def end(self, error: aio.AioRpcError | None = None) -> None:
        self._call.cancel()
        self._tally.status(self.shown(), error)

    def shown(self) -> Case:
        return Case("Connect", tuple(self._sent))

    def _count(self, finished: pb.Finished) -> None:
        name = pb.FinishCause.Name(finished.cause).removeprefix("FINISH_CAUSE_")
        self._tally.counts[f"finished {name}"] += 1
        if finished.cause == pb.FINISH_CAUSE_INTERNAL:
            self._tally.problem(f"finished INTERNAL: {finished.message}", self.shown())
        self._tally.text(finished.message, self.shown())


class Witness:
    """Submits valid requests, one after another, on one stream that nothing may end."""

    def __init__(self, target: Target) -> None:
        self._stream = Stream(target, Tally())
        self._requests = itertools.count(1)

    async def completes(self) -> bool:
        """Whether the next request got the tokens that it gets alone."""
        request = next(self._requests)
        prompt = [request % 900, 2, 3, request % 7]
        await self._stream.send(submit(request, prompt))
        try:
            await self._stream.finish(request)
        except (aio.AioRpcError, TimeoutError):
            return False
        return self._stream.tokens.get(request) == completion(prompt, TOKENS)


def _draw(count: int, seed: int) -> Iterator[Case]:
    """Draws cases of a few messages each, besides sequences of messages that are each valid."""
    rng = random.Random(seed)
    messages = draw_messages(pb.FrontendMessage, EXAMPLES, count, seed)
    for each in _hostile_sequences():
        yield from (Case(way, tuple(each)) for way in _WAYS)
    while some := tuple(itertools.islice(messages, rng.randint(1, 5))):
        yield Case(rng.choice(_WAYS[:2]), some)


async def _send(target: Target, case: Case, tally: Tally) -> None:
    """Sends hostile messages on a stream, whose method says how the client ends it."""
    if case.method in _WAYS[:2]:
        await _converse(target, tally, list(case.messages), half_close=case.method == _WAYS[0])
        return
    stream = Stream(target, tally)
    await stream.send(*case.messages[:100])
    if case.method == "Connect, closes at once":
        await stream.half_close()
        await stream.finish(-1)
    stream.end()


async def _converse(target: Target, tally: Tally, sent: list[bytes], *, half_close: bool) -> None:
    """Sends hostile messages on a stream, then a valid request of the lowest priority. A message
    that ends the stream is the last: grpc.aio hides its status from a client that keeps writing."""
    stream = Stream(target, tally)
    prompt = [1, 2, 3]
    last = next((i for i, message in enumerate(sent) if _ends_the_stream(message)), None)
    error = None
    try:
        await stream.read()
        if last is not None:
            await stream.send(*sent[: last + 1])
            await stream.finish(_SENTINEL)
            tally.problem("the stream did not end, or ended without a reason", stream.shown())
        await stream.send(*sent, submit(_SENTINEL, prompt, priority=_LAST))
        await stream.finish(_SENTINEL)
        if half_close:
            await stream.half_close()
            await stream.finish(0)
        if stream.tokens.get(_SENTINEL) != completion(prompt, TOKENS):
            tally.problem("a valid request after hostile ones got other tokens", stream.shown())
    except aio.AioRpcError as raised:
        error = raised
    except TimeoutError:
        tally.problem("no answer", stream.shown())
    stream.end(error)


def _ends_the_stream(data: bytes) -> bool:
    try:
        message = parse_message(data, pb.FrontendMessage.FromString)
        read_sequence(0, message.submit, 0.0)
    except InvalidArgumentError:
        return True
    return False


def _hostile_sequences() -> list[list[bytes]]:
    """Messages that are each valid on their own."""
    again = submit(5, [1, 2, 3])
    beams = submit(10, [1, 2], beam_width=4)
    last = submit((1 << 64) - 1, [1, 2], beam_width=4)
    regex = pb.Grammar(kind=pb.GRAMMAR_KIND_REGEX, text="[a-z]+")
    matching = submit(7, [1, 2], grammar=regex)
    return [
        [abort(9)] * _MANY_ABORTS,
        [again] * 20,
        [again, abort(5)] * 20,
        [beams, submit(11, [1, 2]), submit(13, [4], beam_width=2)],
        [submit(12, [1, 2]), beams, abort(11), abort(10)],
        [last, submit((1 << 64) - 1, [1])],
        [matching] * 3,
        [matching, abort(7)] * 3,
        [submit(i, [i]) for i in range(100)],
        [pb.FrontendMessage().SerializeToString()] * 100,
    ]
