"""Structured output in the engine: sequences that await a grammar or mask hold up no others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from scheduler_svc.core.planning.step_times import StepTimes
from scheduler_svc.core.sampling import SamplingParams
from scheduler_svc.core.sequence import FinishCause, Sequence
from scheduler_svc.core.step import End, Output
from scheduler_svc.engine import Engine
from scheduler_svc.grammar import constraints
from scheduler_svc.grammar.errors import GrammarError, GrammarsBusyError
from shared.sampling_params import GrammarKind
from tests.oracle import completion
from tests.scheduler_svc.grammar.rig import (
    END,
    GRAMMAR,
    FakeGrammars,
    OddTokens,
    Worker,
    expected,
    odd,
    running,
)
from tests.scheduler_svc.schedulers import make_scheduler

DEAD_END = GrammarError(GrammarKind.REGEX, "none can follow")


@pytest.fixture(autouse=True)
def odd_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraints, "RemoteMatcher", OddTokens)


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize(
    ("losses", "num_blocks"), [([], 64), ([2], 64), ([1, 2, 5, 9], 64), ([], 8)]
)
async def test_each_token_is_one_that_its_mask_allows(
    losses: list[int], num_blocks: int, sync: bool
) -> None:
    async with running(FakeGrammars(), num_blocks, losses, sync) as rig:
        for number in (1, 2, 3):
            rig.engine.submit(odd(number, 18))
        await rig.ended(1, 2, 3)
        assert num_blocks == 64 or rig.engine.scheduler.stats.preemptions
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


@pytest.mark.parametrize(("ends", "min_tokens"), [((), 0), ((END,), 0), ((END,), 10)])
async def test_a_complete_grammar_ends_the_completion(
    ends: tuple[int, ...], min_tokens: int
) -> None:
    async with running(FakeGrammars(most=3)) as rig:
        rig.engine.submit(odd(1, 20, eos_token_ids=frozenset(ends), min_tokens=min_tokens))
        await rig.ended(1)
        assert rig.tokens(1) == [*expected(1, 3), *ends]
        end = rig.end(1)
        assert end is not None
        assert end.end.cause is FinishCause.EOS


async def test_other_sequences_continue_while_a_mask_is_computed() -> None:
    grammars = FakeGrammars()
    async with running(grammars) as rig:
        rig.engine.submit(odd(1, 3))
        await rig.until(lambda: rig.tokens(1))
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
        await rig.until(lambda: rig.tokens(1))
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
        await rig.until(lambda: len(rig.tokens(1)) == 6)
        assert rig.tokens(1) == expected(1, 6)


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
    engine = Engine(make_scheduler(16), Worker(16, ()), outputs.extend)
    engine.submit(odd(1))
    assert [output.end.cause for output in outputs] == [FinishCause.INVALID]


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
        assert all(end and end.retry_after_s > 0 for end in ends)
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
