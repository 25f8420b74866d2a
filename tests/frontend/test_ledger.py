"""The state of a completion at its scheduler, from submission to the scheduler's death."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from frontend.engines.ledger import MIN_PROGRESS, Ledger, State
from frontend.engines.placement import EngineLoad, Fit
from frontend.engines.prefix_index import PrefixIndex
from frontend.engines.token_stream import TokenStream, Waiter, WakeUps
from frontend.request import Request, Sampling

SAMPLING = Sampling(seed=0, max_tokens=100, eos_token_ids=(), stop_token_ids=(), stop=())


def ledger_of(*numbers: int) -> Ledger:
    """A ledger whose completions were sent to a scheduler."""
    ledger = Ledger(0, EngineLoad())
    for number in numbers:
        stream = TokenStream(number, Request("r", [1], SAMPLING, None), Waiter(WakeUps()))
        ledger.add([stream], Fit())
    send(ledger)
    return ledger


def send(ledger: Ledger) -> None:
    for entry in ledger.entries.values():
        if entry.state is State.WITHHELD:
            entry.state = State.SENT


def states(ledger: Ledger) -> dict[int, State]:
    return {number: entry.state for number, entry in ledger.entries.items()}


def grow(ledger: Ledger, number: int, count: int) -> None:
    for _ in range(count):
        ledger.entries[number].stream.append(5, now=0.0)


def try_alone(ledger: Ledger, number: int) -> None:
    ledger.begin_trial([], withdraw=True, alone=False)
    suspects, _ = ledger.begin_trial([number], withdraw=False, alone=True)
    assert [entry.stream.number for entry in suspects] == [number]


def die(ledger: Ledger) -> TokenStream | None:
    culprit = ledger.disconnect(died=True)
    send(ledger)
    return culprit


def test_a_completion_in_two_deaths_without_progress_is_a_suspect() -> None:
    ledger = ledger_of(1, 2)
    assert die(ledger) is None
    assert set(states(ledger).values()) == {State.SENT}
    grow(ledger, 2, MIN_PROGRESS)
    assert die(ledger) is None
    assert states(ledger) == {1: State.SUSPECT, 2: State.SENT}


def test_an_orderly_end_counts_against_no_completion() -> None:
    ledger = ledger_of(1)
    for _ in range(5):
        assert ledger.disconnect(died=False) is None
        send(ledger)
    assert states(ledger) == {1: State.SENT}


@pytest.mark.parametrize(("tokens_alone", "guilty"), [(0, True), (1, False)])
def test_a_completion_that_was_alone_in_two_deaths_is_guilty_unless_it_got_a_token(
    tokens_alone: int, guilty: bool
) -> None:
    ledger = ledger_of(1, 2)
    for _ in range(2):
        assert die(ledger) is None
    try_alone(ledger, 1)
    assert states(ledger) == {1: State.ALONE, 2: State.SUSPECT}
    assert die(ledger) is None
    try_alone(ledger, 1)
    grow(ledger, 1, tokens_alone)
    culprit = die(ledger)
    assert (culprit is ledger.entries[1].stream) is guilty
    assert states(ledger)[2] is State.SUSPECT


@pytest.mark.parametrize("next_trial", [False, True])
def test_a_death_counts_against_withdrawn_completions_until_the_next_trial(
    next_trial: bool,
) -> None:
    ledger = ledger_of(1)
    for _ in range(2):
        ledger.begin_trial([], withdraw=True, alone=False)
        assert (states(ledger), ledger.holding) == ({1: State.WITHDRAWN}, True)
        if next_trial:
            ledger.begin_trial([], withdraw=False, alone=True)
            assert (states(ledger), ledger.holding) == ({1: State.WITHHELD}, True)
        die(ledger)
        assert not ledger.holding
    assert states(ledger) == {1: State.SENT if next_trial else State.SUSPECT}


def test_a_trial_ends_with_progress_or_the_end_or_the_next_trial() -> None:
    ledger = ledger_of(1, 2, 3)
    for _ in range(2):
        die(ledger)
    suspects, before = ledger.begin_trial([1, 2, 9], withdraw=False, alone=False)
    assert ([entry.stream.number for entry in suspects], before) == ([1, 2], [])
    assert ledger.clear() == []
    grow(ledger, 1, MIN_PROGRESS)
    ledger.remove(2)
    assert ledger.clear() == [1, 2]
    assert states(ledger) == {1: State.SENT, 3: State.SUSPECT}
    ledger.begin_trial([3], withdraw=False, alone=False)
    assert ledger.begin_trial([], withdraw=False, alone=False) == ([], [3])
    assert states(ledger)[3] is State.SENT


def test_a_prompt_is_promised_until_its_first_completion_begins_or_ends() -> None:
    load, index = EngineLoad(), PrefixIndex(4)
    ledger = Ledger(0, load)
    names: Sequence[int] = [11, 12]
    for number, end in ((1, ledger.remove), (3, lambda n: ledger.settle(ledger.entries[n]))):
        request = Request("r", [1], SAMPLING, None)
        pair = [TokenStream(number + i, request, Waiter(WakeUps()), i) for i in range(2)]
        ledger.add(pair, Fit(7, 0, names, index))
        assert load.unstarted_tokens == 7
        assert index.matches(names, [0]) == {0: 2}
        end(number)
        assert load.unstarted_tokens == 0
        assert index.matches(names, [0]) == {0: 0}
