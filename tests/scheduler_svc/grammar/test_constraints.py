"""Structured output in the engine: sequences that await a grammar or mask hold up no others."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Hashable, Iterable
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager
from typing import Any, cast

import numpy as np
import pytest

from scheduler_svc.core.admission import Limits
from scheduler_svc.core.block_manager import BlockManager
from scheduler_svc.core.client import Client
from scheduler_svc.core.planning.step_times import StepTimes
from scheduler_svc.core.sampling import Grammar, GrammarKind, SamplingParams
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import FinishCause, Request, Sequence
from scheduler_svc.core.step import Answer, End, Output, Step
from scheduler_svc.engine import Engine, WorkersLostError
from scheduler_svc.grammar import constraints
from scheduler_svc.grammar.errors import GrammarError, GrammarsBusyError
from scheduler_svc.grammar.grammars import Grammars
from scheduler_svc.rpc.step_encoding import encode_step, read_answer
from tests.oracle import VOCAB_SIZE, completion
from tests.sanitizer import Limits as StepLimits
from tests.sanitizer import Sanitizer

GRAMMAR = Grammar(GrammarKind.REGEX, "odd")
END = 999
DEAD_END = GrammarError(GrammarKind.REGEX, "none can follow")
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
        limits = StepLimits(8, 32, 4 * self._num_blocks)
        self._sanitizer = Sanitizer(limits, self._num_blocks, 4, self._epoch)

    max_run = 1

    async def cut(self) -> None:
        raise AssertionError

    async def send(self, run: Seq[Step]) -> None:
        (step,) = run
        self._sent += 1
        if self._sent in self._losses:
            raise WorkersLostError("planted")
        self._step_id += 1
        request = encode_step(step, 4, self._epoch, self._step_id)
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
        limits = Limits(8, 32, 4 * num_blocks, 100, VOCAB_SIZE)
        self.worker = Worker(num_blocks, losses)
        self.engine = Engine(
            Scheduler(limits, BlockManager(num_blocks, 4)),
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
        return next((o for o in self.outputs if o.seq.key.number == number and o.finished), None)

    async def ended(self, *numbers: int) -> None:
        while not all(self.end(number) for number in numbers):
            self.news.clear()
            await asyncio.wait_for(self.news.wait(), 60)


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


@pytest.fixture(autouse=True)
def odd_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraints, "RemoteMatcher", OddTokens)


def odd(number: int, max_tokens: int = 6, client: str = "", **fields: Any) -> Sequence:
    generated = fields.pop("generated_ids", ())
    params = SamplingParams(max_tokens, grammar=GRAMMAR, **fields)
    request = Request(client=Client(client))
    return Sequence((0, number), [1, 2, number], params, request, generated_ids=generated)


def expected(number: int, count: int, seed: int = 0) -> list[int]:
    even = range(0, VOCAB_SIZE, 2)
    return completion([1, 2, number], count, seed, min_tokens=count, ends={*even, END})


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("losses", [[], [2], [1, 2, 5, 9]])
async def test_each_token_is_one_that_its_mask_allows(losses: list[int], sync: bool) -> None:
    async with running(FakeGrammars(), losses=losses, sync=sync) as rig:
        for number in (1, 2, 3):
            rig.engine.submit(odd(number))
        await rig.ended(1, 2, 3)
        for number in (1, 2, 3):
            assert rig.tokens(number) == expected(number, 6)


async def test_preempted_sequences_continue_after_their_tokens() -> None:
    async with running(FakeGrammars(), num_blocks=8) as rig:
        for number in (1, 2, 3):
            rig.engine.submit(odd(number, 18))
        await rig.ended(1, 2, 3)
        assert rig.engine.scheduler.stats.preemptions
        for number in (1, 2, 3):
            assert rig.tokens(number) == expected(number, 18)


async def test_resumed_sequences_continue_after_their_tokens() -> None:
    async with running(FakeGrammars()) as rig:
        rig.engine.submit(odd(5, generated_ids=expected(5, 4)))
        await rig.ended(5)
        assert rig.tokens(5) == expected(5, 6)[4:]
        rig.engine.submit(odd(6, generated_ids=[2]))
        await rig.ended(6)
        output = rig.end(6)
        assert output is not None
        assert isinstance(end := output.end, End)
        assert end.cause is FinishCause.INVALID
        assert "token 2 does not match" in end.message


async def test_each_completion_of_a_prompt_has_its_own_matcher() -> None:
    async with running(FakeGrammars()) as rig:
        rig.engine.submit(odd(1), n=3)
        await rig.ended(1, 2, 3)
        for i in range(3):
            assert rig.tokens(1 + i) == expected(1, 6, seed=i)


@pytest.mark.parametrize("ends", [(), (END,)], ids=["by itself", "with an end token"])
async def test_a_complete_grammar_ends_the_completion(ends: tuple[int, ...]) -> None:
    async with running(FakeGrammars(most=3)) as rig:
        rig.engine.submit(odd(1, 20, eos_token_ids=frozenset(ends)))
        await rig.ended(1)
        assert rig.tokens(1) == [*expected(1, 3), *ends]
        end = rig.end(1)
        assert end is not None
        assert end.finished is FinishCause.EOS


async def test_min_tokens_cannot_go_beyond_the_grammar() -> None:
    async with running(FakeGrammars(most=3)) as rig:
        rig.engine.submit(odd(1, 20, eos_token_ids=frozenset({END}), min_tokens=10))
        await rig.ended(1)
        assert rig.tokens(1) == [*expected(1, 3), END]


async def test_other_sequences_continue_while_a_mask_is_computed() -> None:
    grammars = FakeGrammars()
    async with running(grammars) as rig:
        rig.engine.submit(odd(1, 3))
        while not rig.tokens(1):
            rig.news.clear()
            await asyncio.wait_for(rig.news.wait(), 60)
        grammars.filled.clear()
        rig.engine.submit(Sequence((0, 7), [4, 5], SamplingParams(40)))
        await rig.ended(7)
        assert rig.tokens(7) == completion([4, 5], 40)
        assert len(rig.tokens(1)) < 3
        grammars.filled.set()
        await rig.ended(1)


async def test_the_next_step_waits_for_masks_while_one_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(StepTimes, "seconds_of", lambda *_: 1000.0)
    grammars = FakeGrammars()
    async with running(grammars) as rig:
        rig.engine.submit(Sequence((0, 7), [4, 5], SamplingParams(20)))
        rig.engine.submit(odd(1, 3))
        while not rig.tokens(1):
            rig.news.clear()
            await asyncio.wait_for(rig.news.wait(), 60)
        grammars.filling.clear()
        grammars.filled.clear()
        grammars.on_filling = rig.worker.may_answer.clear
        await asyncio.wait_for(grammars.filling.wait(), 60)
        grammars.on_filling = lambda: None
        sent = len(rig.worker.masked_rows)
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(rig.worker.masked_rows) == sent
        grammars.filled.set()
        for _ in range(100):
            await asyncio.sleep(0)
        assert rig.worker.masked_rows[sent:] == [1]
        rig.worker.may_answer.set()
        await rig.ended(1, 7)


async def test_other_sequences_continue_while_a_grammar_is_compiled() -> None:
    grammars = FakeGrammars()
    grammars.compiled.clear()
    async with running(grammars) as rig:
        rig.engine.submit(odd(1))
        rig.engine.submit(Sequence((0, 7), [4, 5], SamplingParams(10)))
        await rig.ended(7)
        assert not rig.tokens(1)
        grammars.compiled.set()
        await rig.ended(1)


async def test_a_number_is_taken_while_its_grammar_is_compiled() -> None:
    grammars = FakeGrammars()
    grammars.compiled.clear()
    async with running(grammars) as rig:
        rig.engine.submit(odd(1))
        again = odd(1, max_tokens=2)
        rig.engine.submit(again)
        await rig.ended(1)
        (refused,) = (output for output in rig.outputs if isinstance(output.end, End))
        assert refused.seq is again
        assert refused.end is not None
        assert refused.end.message == "request: its number is in use"
        grammars.compiled.set()
        while len(rig.tokens(1)) < 6:
            rig.news.clear()
            await asyncio.wait_for(rig.news.wait(), 60)
        assert rig.tokens(1) == expected(1, 6)


async def test_requests_that_wait_for_grammars_count_as_waiting() -> None:
    grammars = FakeGrammars()
    grammars.compiled.clear()
    async with running(grammars) as rig:
        for number in range(101):
            rig.engine.submit(odd(number))
        await rig.ended(100)
        (refused,) = (output.end for output in rig.outputs if isinstance(output.end, End))
        assert refused.cause is FinishCause.QUEUE_FULL
        assert refused.retry_after_s > 0
        rig.engine.abort_connection(0)


async def test_a_lost_connection_drops_a_few_waiting_sequences_per_turn() -> None:
    grammars = FakeGrammars()
    grammars.compiled.clear()
    async with running(grammars) as rig:
        for number in range(20):
            rig.engine.submit(odd(number))
        await asyncio.sleep(0)
        waiting = rig.engine._constraints._beginning  # type: ignore[union-attr]
        left = [len(waiting)]
        more = True
        while more:
            more = rig.engine.abort_connection(0, 8)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            left.append(len(waiting))
        assert left == [20, 12, 4, 0]


@pytest.mark.parametrize("whole_connection", [False, True])
async def test_a_sequence_aborted_while_it_waits_leaves_nothing(whole_connection: bool) -> None:
    for gate in ("compiled", "filled"):
        grammars = FakeGrammars()
        getattr(grammars, gate).clear()
        async with running(grammars) as rig:
            rig.engine.submit(odd(1))
            await asyncio.sleep(0)
            rig.engine.abort_connection(0) if whole_connection else rig.engine.abort((0, 1))
            getattr(grammars, gate).set()
            rig.engine.submit(odd(2))
            await rig.ended(2)
            assert not rig.tokens(1)


@pytest.mark.parametrize(
    ("error", "cause", "message"),
    [
        (GrammarError(GrammarKind.REGEX, "bad"), FinishCause.INVALID, "sampling.structured_output"),
        (RuntimeError("secret"), FinishCause.INTERNAL, "internal error"),
        (GrammarsBusyError("all slots are taken"), FinishCause.QUEUE_FULL, "all slots are taken"),
    ],
)
async def test_a_sequence_whose_grammar_is_not_compiled_ends_at_once(
    error: Exception, cause: FinishCause, message: str
) -> None:
    grammars = FakeGrammars()
    grammars.error = error
    async with running(grammars) as rig:
        rig.engine.submit(odd(1), n=2)
        await rig.ended(1)
        (end,) = (output.end for output in rig.outputs)
        assert isinstance(end, End)
        assert end.cause is cause
        assert end.message.startswith(message)
        assert "secret" not in end.message
        assert (end.retry_after_s > 0) == (cause is FinishCause.QUEUE_FULL)


async def test_an_engine_without_grammars_rejects_them() -> None:
    outputs: list[Output] = []
    scheduler = Scheduler(Limits(8, 32, 64, 100, VOCAB_SIZE), BlockManager(16, 4))
    engine = Engine(scheduler, Worker(16, ()), outputs.extend)
    engine.submit(odd(1))
    assert [output.finished for output in outputs] == [FinishCause.INVALID]


@pytest.mark.parametrize(("generated", "left_out"), [(0, [7, END]), (1, [7, END]), (2, [])])
def test_before_min_tokens_no_end_token_is_allowed_beside_others(
    generated: int, left_out: list[int]
) -> None:
    params = SamplingParams(4, grammar=GRAMMAR, eos_token_ids=frozenset({END, 7}), min_tokens=2)
    seq = Sequence((0, 1), [1, 2, 3], params, generated_ids=[1] * generated)
    mask = np.frombuffer(constraints.without_early_end(seq, b"\xff" * 128), np.uint8)
    assert np.flatnonzero(np.unpackbits(mask, bitorder="little") == 0).tolist() == left_out


@pytest.mark.parametrize("flood", ["flood", ""])
async def test_a_client_finds_room_while_another_clients_grammars_wait(flood: str) -> None:
    grammars = FakeGrammars()
    grammars.compiled.clear()
    async with running(grammars) as rig:
        for number in range(150):
            rig.engine.submit(odd(number, client=flood))
        ends = [output.end for output in rig.outputs]
        assert {end and end.cause for end in ends} == {FinishCause.QUEUE_FULL}
        assert len(ends) == 50
        rig.engine.submit(odd(200, client="other"))
        grammars.compiled.set()
        await rig.ended(200)
        assert rig.tokens(200)
        for number in range(100):
            await rig.ended(number)
        assert not rig.engine._constraints._beginning_of  # type: ignore[union-attr]


@pytest.mark.parametrize("after", [0, 1, 4])
@pytest.mark.parametrize(
    ("spoil", "cause", "message"),
    [
        (lambda _: DEAD_END, FinishCause.INVALID, str(DEAD_END)),
        (lambda mask: mask[:-4], FinishCause.INTERNAL, "internal error"),
        (lambda mask: bytes(len(mask)), FinishCause.INTERNAL, "internal error"),
    ],
    ids=["dead end", "another size", "no token"],
)
async def test_an_outcome_without_a_usable_mask_ends_its_sequence_alone(
    spoil: Callable[[bytes], bytes | GrammarError], cause: FinishCause, message: str, after: int
) -> None:
    async with running(
        FakeGrammars(spoil=lambda mask, n: spoil(mask) if n == after else mask)
    ) as rig:
        rig.engine.submit(odd(1))
        rig.engine.submit(Sequence((0, 7), [4, 5], SamplingParams(10)))
        await rig.ended(1, 7)
        output = rig.end(1)
        assert output is not None
        assert isinstance(end := output.end, End)
        assert (end.cause, end.message) == (cause, message)
        assert rig.tokens(1) == expected(1, after)
        assert len(rig.tokens(7)) == 10
