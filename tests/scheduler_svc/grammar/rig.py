"""An engine whose sequences all have the grammar of odd tokens, and its worker. No process runs."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Hashable, Iterable
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager
from typing import Any, cast

import numpy as np

from scheduler_svc.core.client import Client
from scheduler_svc.core.sampling import SamplingParams
from scheduler_svc.core.sequence import Request, Sequence
from scheduler_svc.core.step import Answer, Output, Step
from scheduler_svc.engine import Engine, WorkersLostError
from scheduler_svc.grammar.errors import GrammarError
from scheduler_svc.grammar.grammars import Grammars
from scheduler_svc.rpc.step_encoding import encode_step, read_answer
from shared.paging import Paging
from shared.sampling_params import Grammar, GrammarKind
from tests.oracle import VOCAB_SIZE, completion
from tests.sanitizer import Limits, Sanitizer
from tests.scheduler_svc.schedulers import make_scheduler

GRAMMAR = Grammar(GrammarKind.REGEX, "odd")
END = 999
Spoil = Callable[[bytes, int], bytes | GrammarError]


class OddTokens:
    """Stands in for a matcher: every token is odd, and END follows after `most` of them."""

    def __init__(self, compiled: FakeGrammars, tokens: array[int], start: int) -> None:
        self.grammar = compiled
        self._tokens = tokens
        self._start = start

    def outcome(self) -> bytes | GrammarError | None:
        generated = self._tokens[self._start :]
        if even := [token for token in generated if not token % 2]:
            return GrammarError(GrammarKind.REGEX, f"token {even[0]} does not match")
        grammar = self.grammar
        if END in generated or (len(generated) == grammar.most and not grammar.has_ends):
            return None
        allowed = np.zeros(1024, np.uint8)
        if len(generated) < grammar.most:
            allowed[1:END:2] = 1
        else:
            allowed[END] = 1
        mask = np.packbits(allowed[:VOCAB_SIZE], bitorder="little").tobytes() + bytes(3)
        return grammar.spoil(mask, len(generated))


class FakeGrammars:
    def __init__(self, most: int = 100, spoil: Spoil = lambda mask, _: mask) -> None:
        self.most = most
        self.has_ends = True
        self.spoil = spoil  # given a mask and its completion's length
        self.compiled = asyncio.Event()
        self.compiled.set()
        self.filled = asyncio.Event()
        self.filled.set()
        self.filling = asyncio.Event()
        self.on_filling: Callable[[], None] = lambda: None
        self.error: Exception | None = None

    async def compile(
        self, kind: int, text: str, ends: Iterable[int], client: Hashable
    ) -> FakeGrammars:
        assert (kind, text) == (GrammarKind.REGEX, "odd")
        self.has_ends = END in ends
        await self.compiled.wait()
        if self.error:
            raise self.error
        return self

    async def masks(
        self, matchers: Seq[OddTokens], guesses: object = ()
    ) -> list[bytes | GrammarError | None]:
        self.filling.set()
        self.on_filling()
        await self.filled.wait()
        return [matcher.outcome() for matcher in matchers]

    def close(self) -> None:
        pass


class Worker:
    """Answers at once, if it may, but loses the workers at the steps numbered in `losses`."""

    def __init__(self, num_blocks: int, losses: Iterable[int]) -> None:
        self._num_blocks = num_blocks
        self._losses = set(losses)
        self._epoch = self._sent = 0
        self.masked_rows: list[int] = []  # of each step
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self._reset()

    def _reset(self) -> None:
        self._epoch += 1
        self._step_id = 0
        self._answers: asyncio.Queue[Answer] = asyncio.Queue()
        limits = Limits(8, 32, 4 * self._num_blocks)
        self._sanitizer = Sanitizer(limits, self._num_blocks, Paging(4), self._epoch)

    max_run = 1

    async def cut(self) -> None:
        raise AssertionError

    async def send(self, run: Seq[Step]) -> None:
        (step,) = run
        self._sent += 1
        if self._sent in self._losses:
            raise WorkersLostError("planted")
        self._step_id += 1
        request = encode_step(step, Paging(4), self._epoch, self._step_id)
        self.masked_rows.append(len(request.features.masked) // 4)
        self._answers.put_nowait(read_answer(request, self._sanitizer.run(request)))

    async def receive(self) -> Answer:
        answer = await self._answers.get()
        await self.may_answer.wait()
        return answer

    async def watch(self) -> str:
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await never

    async def recover(self, *, keep: bool) -> bool:
        self._reset()
        return False


class Rig:
    def __init__(self, grammars: FakeGrammars, num_blocks: int, losses: Iterable[int], sync: bool):
        self.news = asyncio.Event()
        self.outputs: list[Output] = []
        self.worker = Worker(num_blocks, losses)
        self.engine = Engine(
            make_scheduler(num_blocks),
            self.worker,
            self._emit,
            sync=sync,
            grammars=cast(Grammars, grammars),
        )

    def _emit(self, outputs: list[Output]) -> None:
        self.outputs += outputs
        self.engine.scheduler.check_integrity()
        self.news.set()

    def tokens(self, number: int) -> list[int]:
        return [o.token for o in self.outputs if o.seq.key.number == number and o.token is not None]

    def end(self, number: int) -> Output | None:
        return next((o for o in self.outputs if o.seq.key.number == number and o.end), None)

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            self.news.clear()
            await asyncio.wait_for(self.news.wait(), 60)

    async def ended(self, *numbers: int) -> None:
        await self.until(lambda: all(self.end(number) for number in numbers))


@asynccontextmanager
async def running(
    grammars: FakeGrammars,
    num_blocks: int = 64,
    losses: Iterable[int] = (),
    sync: bool = False,
) -> AsyncIterator[Rig]:
    rig = Rig(grammars, num_blocks, losses, sync)
    task = asyncio.create_task(rig.engine.run())
    try:
        yield rig
        await asyncio.sleep(0)
        scheduler = rig.engine.scheduler
        assert not scheduler.open_sequences()
        assert scheduler.blocks.num_free_blocks == num_blocks
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def odd(number: int, max_tokens: int = 6, client: str = "", **fields: Any) -> Sequence:
    generated = fields.pop("generated_ids", ())
    params = SamplingParams(max_tokens, grammar=GRAMMAR, **fields)
    request = Request(client=Client(client))
    return Sequence((0, number), [1, 2, number], params, request, generated_ids=generated)


def expected(number: int, count: int, seed: int = 0) -> list[int]:
    even = range(0, VOCAB_SIZE, 2)
    return completion([1, 2, number], count, seed, min_tokens=count, ends={*even, END})
