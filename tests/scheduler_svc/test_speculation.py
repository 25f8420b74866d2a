"""The choice of drafts: as many as are worth their time, of the sequences that gain most."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scheduler_svc.core.client import Client
from scheduler_svc.core.guesses.guess import DRAFTED, MAX_DRAFTS
from scheduler_svc.core.planning.speculation import Speculation
from scheduler_svc.core.sampling import SamplingParams
from scheduler_svc.core.sequence import Request, Row, Sequence
from scheduler_svc.core.step import Step, StepTiming
from shared.sampling_params import Grammar

CYCLE = [5, 6, 7, 8]
Time = Callable[[int], float]  # seconds of a step of so many rows


def decoding(
    tokens: list[int], max_tokens: int = 100, client: str = "", connection: int = 0
) -> Sequence:
    """A sequence of which all tokens but the last are computed."""
    request = Request(client=Client(client))
    seq = Sequence((connection, 1), tokens, SamplingParams(max_tokens), request)
    seq.begin_at(len(tokens) - 1)
    return seq


def flat(rows: int) -> float:
    return 0.01


def proportional(rows: int) -> float:
    return 0.01 * rows


def taught(seconds: Time, wait_s: float = 0.0) -> Speculation:
    """Speculation that knows how long steps take."""
    speculation = Speculation()
    for size in range(1, 65):
        rows = [Row(decoding(CYCLE), 3, 1, True)] * size
        step = Step(1, rows, num_decodes=size, num_drafts=size - 1)
        for _ in range(10):
            speculation.step_times.step_answered(step, StepTiming(seconds(size), wait_s, 0.0))
    return speculation


def plain_step(seq: Sequence) -> Step:
    return Step(1, [Row(seq, 15, 1, True)], num_decodes=1)


def mislead(speculation: Speculation, client: str, connection: int = 0) -> None:
    """Teaches that repetitions of a client do not continue as before."""
    for _ in range(100):
        seq = decoding(CYCLE * 4, client=client, connection=connection)
        speculation.choose([seq], 100)
        extend(seq, 99)
        speculation.choose([seq], 100)


def extend(seq: Sequence, token: int) -> None:
    """Appends a sampled token."""
    seq.tokens.append(token)
    seq.begin_at(len(seq.tokens) - 1)


def test_a_cycle_is_drafted_as_far_as_it_is_likely() -> None:
    speculation, seq = taught(flat), decoding(CYCLE * 4)
    few = len(speculation.choose([seq], 100)[seq])
    for i in range(40):
        extend(seq, CYCLE[i % 4])
        drafts = speculation.choose([seq], 100)[seq]
        assert drafts == [CYCLE[(i + 1 + j) % 4] for j in range(len(drafts))]
    assert few < len(drafts) == MAX_DRAFTS


def test_wrong_guesses_end_drafting() -> None:
    speculation, seq = taught(lambda rows: 0.01 + 0.003 * rows), decoding(CYCLE * 4)
    assert speculation.choose([seq], 100)
    for i in range(200):
        extend(seq, 100 + i)
        extend(seq, 5)
        speculation.choose([seq], 100)
    assert not speculation.choose([seq], 100)


@pytest.mark.parametrize(("tokens", "seconds"), [([1, 2, 3, 4], flat), (CYCLE * 4, proportional)])
def test_nothing_is_drafted_that_occurred_nowhere_or_takes_its_time(
    tokens: list[int], seconds: Time
) -> None:
    assert not taught(seconds).choose([decoding(tokens)], 100)


@pytest.mark.parametrize("slower", [False, True])
def test_as_many_rows_are_drafted_as_cost_nothing(slower: bool) -> None:
    """If steps of one row get slower, nothing says that larger ones are as fast as before."""
    speculation, seq = taught(lambda rows: 0.01 if rows <= 4 else 0.01 * rows), decoding(CYCLE * 4)
    for _ in range(200 if slower else 0):
        speculation.step_times.step_answered(plain_step(seq), StepTiming(0.1, 0.0, 0.0))
    for i in range(40):
        extend(seq, CYCLE[i % 4])
        drafts = speculation.choose([seq], 100)
    assert len(drafts[seq]) == 3


def test_many_streams_do_not_pay_for_the_drafts_of_one() -> None:
    """A step of 9 rows takes twice as long: one stream would gain more than that, but seven others
    would lose."""
    speculation = taught(lambda rows: 0.01 if rows <= 8 else 0.02)
    copies, others = decoding(CYCLE * 4), [decoding([10 * i, 10 * i + 1]) for i in range(1, 8)]
    for i in range(40):
        extend(copies, CYCLE[i % 4])
        drafts = speculation.choose([copies, *others], 100)
    assert not drafts
    assert len(speculation.choose([copies], 100)[copies]) == 7


@pytest.mark.parametrize("room", [1, 5])
def test_drafts_fit_into_the_room(room: int) -> None:
    speculation, seqs = taught(flat), [decoding(CYCLE * 4), decoding(CYCLE * 5)]
    drafts = speculation.choose(seqs, room)
    assert sum(map(len, drafts.values())) == room


def test_the_last_token_is_not_computed() -> None:
    seq = decoding(CYCLE * 4, max_tokens=3)
    assert len(taught(flat).choose([seq], 100)[seq]) == 2


def test_waiting_must_gain_more_than_it_costs() -> None:
    seq = decoding(CYCLE * 4)
    seq.schedule(1, 1, 0)
    assert taught(flat).waits([seq], 100)
    assert not taught(flat, wait_s=1.0).waits([seq], 100)
    assert not taught(flat).waits([decoding([1, 2, 3])], 100)
    assert not taught(flat).waits([seq], 0)


def test_nothing_is_drafted_before_the_time_of_a_step_is_known() -> None:
    speculation, seq = Speculation(), decoding(CYCLE * 4)
    assert not speculation.choose([seq], 100)
    speculation.step_times.step_answered(plain_step(seq), StepTiming(0.01, 0.0, 0.0))
    assert len(speculation.choose([seq], 100)[seq]) == 1  # which doubles the rows


@pytest.mark.parametrize(
    ("misled", "others"),
    [
        ({"client": "a"}, [{"client": "b"}, {}]),
        ({"connection": 3}, [{"connection": 4}, {"connection": 3, "client": "a"}]),
    ],
)
def test_one_clients_wrong_guesses_do_not_end_the_drafts_of_others(
    misled: dict[str, Any], others: list[dict[str, Any]]
) -> None:
    """The anonymous clients of a connection are one client."""
    speculation = taught(flat)
    mislead(speculation, **{"client": "", **misled})
    assert not speculation.choose([decoding(CYCLE * 4, **misled)], 100)
    for other in others:
        assert speculation.choose([decoding(CYCLE * 4, **other)], 100)


def test_clients_that_have_gone_are_forgotten() -> None:
    """A client that keeps sending requests is not."""
    speculation = taught(flat)
    for client in ("gone", "stays"):
        mislead(speculation, client)
    for i in range(1000):
        for client in (f"other {i}", "stays"):
            speculation.choose([decoding(CYCLE * 4, client=client)], 100)
    assert len(speculation._acceptances) <= 256
    assert not speculation.choose([decoding(CYCLE * 4, client="stays")], 100)
    assert speculation.choose([decoding(CYCLE * 4, client="gone")], 100)


def test_a_step_without_drafts_is_measured_again() -> None:
    """It was slow by chance, so that drafts seemed to pay. Each measurement is trusted longer."""
    speculation, seq = Speculation(), decoding(CYCLE * 4)
    runs, length = [], 0
    for _ in range(50):
        drafts = speculation.choose([seq], 1)
        step = plain_step(seq)
        if drafts:
            step.rows.append(Row(seq, 16, 1, True, None, 1))
            step.num_decodes, step.num_drafts = 2, 1
            length += 1
        elif length:
            runs.append(length)
            length = 0
        speculation.step_times.step_answered(step, StepTiming(0.01, 0.0, 0.0))
    assert runs == [2, 4, 8, 16]


def test_a_draft_model_guesses_until_it_is_wrong() -> None:
    speculation, seq = Speculation(by_model=True), decoding(CYCLE * 4)
    speculation.step_times.step_answered(plain_step(seq), StepTiming(0.01, 0.0, 0.0))
    assert speculation.choose([seq], 100)
    for _ in range(100):
        drafts = speculation.choose([seq], 100)
        if not drafts:
            break
        assert {*drafts[seq]} == {DRAFTED}
        rows = [Row(seq, 15 + i, 1, True, None, DRAFTED) for i in range(len(drafts[seq]))]
        step = Step(1, [Row(seq, 15, 1, True), *rows], num_decodes=1 + len(rows))
        speculation.resolve(step, [99] * len(rows))
        assert [row.draft for row in step.rows] == [None, *([99] * len(rows))]
        speculation.step_times.step_answered(step, StepTiming(0.01 * len(step.rows), 0.0, 0.0))
        extend(seq, 5)
    else:
        raise AssertionError("never stops drafting")


def test_nothing_is_drafted_for_a_sequence_with_bad_words() -> None:
    """Which tokens may follow depends on the draft before."""
    speculation = taught(flat, 0.0)
    for words, drafts in ((), True), (((5, 6),), False):
        seq = Sequence((0, 1), CYCLE * 4, SamplingParams(100, bad_words=words))
        seq.begin_at(15)
        assert bool(speculation.choose([seq], 100)) == drafts


@pytest.mark.parametrize("wait_s", [0.0, 10.0])
def test_under_a_grammar_only_what_it_allows_is_drafted(wait_s: float) -> None:
    """Its steps wait for the last answer with and without drafts, so that the wait is no reason to
    draft nothing."""
    speculation = taught(flat, wait_s)
    seq = Sequence((0, 1), CYCLE * 4, SamplingParams(100, grammar=Grammar(1, "{}")))
    seq.begin_at(15)
    assert not speculation.choose([seq], 100)
    guess = speculation.guess(seq)
    assert guess.tokens[:4] == CYCLE
    guess.constrain([5, 6, 900])
    assert speculation.choose([seq], 100) == {seq: [5, 6, 900]}
    extend(seq, 5)
    assert not speculation.choose([seq], 100)
