"""A scheduler whose tokens can be worked out by hand: a completion repeats its prompt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

import numpy as np
from grpc import aio

from shared.pb import scheduler_pb2 as pb
from shared.pb.scheduler_pb2_grpc import (
    SchedulerServiceServicer,
    add_SchedulerServiceServicer_to_server,
)

INFO = pb.EngineInfo(
    max_model_len=128,
    vocab_size=1536,
    num_blocks=64,
    block_size=16,
    max_num_seqs=8,
    max_num_batched_tokens=256,
    max_waiting=32,
    tensor_parallel_size=1,
)
CACHED_PROMPT_TOKENS, QUEUE_S = 3, 0.25  # in every Started


@dataclass
class Live:
    """A completion that the fake scheduler is running."""

    submit: pb.Submit
    prompt: list[int]
    tokens: list[int]
    seed: int


def echo(live: Live) -> int:
    return live.prompt[len(live.tokens) % len(live.prompt)]


def echo_from_seed(live: Live) -> int:
    """Starts elsewhere in the prompt for each seed, so that a request's completions differ."""
    return live.prompt[(len(live.tokens) + live.seed % 8) % len(live.prompt)]


def embedding(prompt: Sequence[int], pooling: int) -> list[int]:
    """The embedding of a prompt, not normalized, or its score."""
    if pooling == pb.POOLING_SCORE:
        return [len(prompt) - 40]
    return [sum(prompt), len(prompt), -pooling, 4]


def logprob_row(token: int, position: int, count: int) -> list[tuple[int, float]]:
    """Log-probabilities of the token and of `count` others, all exact in float32."""
    others = [(other, -0.5 * other - position) for other in range(count)]
    return [(token, -0.25 - position), *others]


@dataclass
class Connection:
    live: dict[int, Live] = field(default_factory=dict)
    outbox: asyncio.Queue[pb.SchedulerMessage | None] = field(default_factory=asyncio.Queue)


class FakeScheduler(SchedulerServiceServicer):
    """Serves `scheduler.proto` on `address`; may be stopped and started again."""

    def __init__(self, address: str, info: pb.EngineInfo = INFO) -> None:
        self.address = address
        self.info = deepcopy(info)
        self.next_token: Callable[[Live], int] = echo
        self.rejection: pb.Finished | None = None  # how every request ends, if set
        self.automatic = True  # runs every request to its end; else `step` makes a token for each
        self.ready = asyncio.Event()  # until then connections wait for their EngineInfo
        self.ready.set()
        self.connected = asyncio.Event()  # by a frontend, with or without its EngineInfo
        self.submits: asyncio.Queue[pb.Submit] = asyncio.Queue()
        self.aborts: asyncio.Queue[int] = asyncio.Queue()
        self.alone = False  # whether the latest connection was made by `ConnectAlone`
        self.block_events: asyncio.Queue[pb.BlockEvents] = asyncio.Queue()  # for the one watcher
        self.connections: list[Connection] = []  # the open ones
        self._connection: Connection | None = None
        self._server: aio.Server | None = None

    async def start(self) -> None:
        self._server = aio.server(options=[("grpc.max_receive_message_length", -1)])
        add_SchedulerServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(self.address)
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    def drop_connection(self) -> None:
        """Ends the connection once queued messages are sent."""
        self.connection.outbox.put_nowait(None)
        self._connection = None

    @property
    def connection(self) -> Connection:
        assert self._connection is not None
        return self._connection

    def step(self) -> None:
        """Makes one token for every request of the latest connection, in one message."""
        self._step(self.connection)

    def step_all(self) -> None:
        """Makes one token for every request of every connection."""
        for connection in self.connections:
            self._step(connection)

    def _step(self, connection: Connection) -> None:
        rows: list[tuple[int, int, int]] = []
        logprobs: list[pb.LogprobRows] = []
        finished: list[pb.Finished] = []
        embeddings: list[pb.Embedding] = []
        for number, live in list(connection.live.items()):
            sampling = live.submit.sampling
            if sampling.beam_width:
                del connection.live[number]
                for index in range(sampling.beam_width):
                    _end_beam(number, index, live, rows, finished)
                continue
            token, offset = self.next_token(live), len(live.tokens)
            rows.append((number, offset, token))
            if sampling.HasField("prompt_logprobs") and live.submit.request == number:
                logprobs += _prompt_rows(number, live)
                sampling.ClearField("prompt_logprobs")
            if sampling.HasField("logprobs"):
                row = logprob_row(token, offset, sampling.logprobs)
                logprobs.append(logprob_rows(number, False, offset, [row]))
            if sampling.pooling:
                values = np.array(embedding(live.prompt, sampling.pooling), "<f4").tobytes()
                embeddings.append(pb.Embedding(request=number, values=values))
            live.tokens.append(token)
            cause = _cause(live, token)
            if cause is not None:
                del connection.live[number]
                finished.append(pb.Finished(request=number, cause=cause))
        output = _output(rows, finished, logprobs)
        output.step_output.embeddings.extend(embeddings)
        connection.outbox.put_nowait(output)

    def send(
        self,
        rows: Sequence[tuple[int, int, int]],
        finished: Sequence[pb.Finished] = (),
        logprobs: Sequence[pb.LogprobRows] = (),
    ) -> None:
        """Sends (number, offset, token id) rows as they are."""
        self.connection.outbox.put_nowait(_output(rows, finished, logprobs))

    async def Connect(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.FrontendMessage], context: object
    ) -> AsyncIterator[pb.SchedulerMessage]:
        async for message in self._converse(request_iterator, alone=False):
            yield message

    async def ConnectAlone(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.FrontendMessage], context: object
    ) -> AsyncIterator[pb.SchedulerMessage]:
        async for message in self._converse(request_iterator, alone=True):
            yield message

    async def _converse(
        self, request_iterator: AsyncIterator[pb.FrontendMessage], *, alone: bool
    ) -> AsyncIterator[pb.SchedulerMessage]:
        self.connected.set()
        await self.ready.wait()
        self.alone = alone
        connection = self._connection = Connection()
        self.connections.append(connection)
        reader = asyncio.create_task(self._read(request_iterator, connection))
        try:
            yield pb.SchedulerMessage(engine_info=self.info)
            while (message := await connection.outbox.get()) is not None:
                yield message
                connection.outbox.task_done()
        finally:
            self.connections.remove(connection)
            reader.cancel()

    def send_state(self, *, serving: bool = True, draining: bool = False) -> None:
        state = pb.EngineState(serving=serving, draining=draining)
        self.connection.outbox.put_nowait(pb.SchedulerMessage(engine_state=state))

    async def WatchBlocks(  # type: ignore[override]
        self, request: pb.WatchBlocksRequest, context: object
    ) -> AsyncIterator[pb.BlockEvents]:
        part = pb.SnapshotPart(index=0, count=1, blocks=0)
        yield pb.BlockEvents(snapshot=part, load=pb.GetLoadResponse(blocks=1))
        while True:
            yield await self.block_events.get()
            self.block_events.task_done()

    async def _read(
        self, messages: AsyncIterator[pb.FrontendMessage], connection: Connection
    ) -> None:
        async for message in messages:
            if message.HasField("abort"):
                connection.live.pop(message.abort.request, None)
                self.aborts.put_nowait(message.abort.request)
                continue
            submit = message.submit
            prompt = np.frombuffer(submit.prompt_ids, "<i4").tolist()
            tokens = np.frombuffer(submit.generated_ids, "<i4").tolist()
            for index in range(submit.n or 1):
                seed = (submit.sampling.seed + index) % 2**64
                live = Live(submit, prompt, tokens.copy(), seed)
                connection.live[submit.request + index] = live
            self.submits.put_nowait(deepcopy(submit))
            if self.rejection is not None:
                for index in range(submit.n or 1):
                    del connection.live[submit.request + index]
                rejection = pb.Finished(request=submit.request)
                rejection.MergeFrom(self.rejection)
                self.send((), [rejection])
            while self.automatic and connection.live:
                self._step(connection)
        connection.outbox.put_nowait(None)  # the frontend has closed its side


def ended(*numbers: int) -> list[pb.Finished]:
    """Completions that have all their tokens."""
    return [pb.Finished(request=each, cause=pb.FINISH_CAUSE_LENGTH) for each in numbers]


def logprob_rows(
    number: int, prompt: bool, first: int, rows: Sequence[Sequence[tuple[int, float]]]
) -> pb.LogprobRows:
    entries = [entry for row in rows for entry in row]
    return pb.LogprobRows(
        request=number,
        prompt=prompt,
        first=first,
        width=len(rows[0]),
        token_ids=np.array([token for token, _ in entries], "<i4").tobytes(),
        values=np.array([value for _, value in entries], "<f4").tobytes(),
    )


def _prompt_rows(number: int, live: Live) -> list[pb.LogprobRows]:
    """The prompt's log-probabilities, in two pieces that overlap."""
    count = live.submit.sampling.prompt_logprobs
    rows = [logprob_row(token, i, count) for i, token in enumerate(live.prompt)]
    middle = len(rows) // 2 + 1
    pieces = ((1, rows[1 : middle + 1]), (middle, rows[middle:]))
    return [logprob_rows(number, True, first, piece) for first, piece in pieces if piece]


def _end_beam(
    number: int,
    index: int,
    live: Live,
    rows: list[tuple[int, int, int]],
    finished: list[pb.Finished],
) -> None:
    """Ends beam number `index`, whose tokens begin at that index of the prompt."""
    for offset in range(live.submit.sampling.max_tokens):
        token = live.prompt[(offset + index) % len(live.prompt)]
        rows.append((number + index, offset, token))
    finished.append(
        pb.Finished(request=number + index, cause=pb.FINISH_CAUSE_LENGTH, score=-0.5 - index)
    )


def _output(
    rows: Sequence[tuple[int, int, int]],
    finished: Sequence[pb.Finished],
    logprobs: Sequence[pb.LogprobRows],
) -> pb.SchedulerMessage:
    handles, offsets, token_ids = zip(*rows, strict=True) if rows else ((), (), ())
    output = pb.StepOutput(
        requests=np.array(handles, "<u8").tobytes(),
        offsets=np.array(offsets, "<i4").tobytes(),
        token_ids=np.array(token_ids, "<i4").tobytes(),
        started=[
            pb.Started(request=number, cached_prompt_tokens=CACHED_PROMPT_TOKENS, queue_s=QUEUE_S)
            for number, offset, _ in rows
            if offset == 0
        ],
        finished=finished,
        logprobs=logprobs,
    )
    return pb.SchedulerMessage(step_output=output)


def _cause(live: Live, token: int) -> pb.FinishCause.ValueType | None:
    sampling = live.submit.sampling
    if token in sampling.eos_token_ids:
        return pb.FINISH_CAUSE_EOS
    if token in sampling.stop_token_ids:
        return pb.FINISH_CAUSE_STOP_TOKEN
    if len(live.tokens) == sampling.max_tokens:
        return pb.FINISH_CAUSE_LENGTH
    return None
