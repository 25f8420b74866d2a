"""Steps with drafted tokens: which tokens hold, and what becomes of the others."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import pytest

from scheduler_svc.core.planning.speculation import Speculation
from scheduler_svc.core.sampling import SamplingParams
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.step import Answer, Logprobs, Output, Step
from scheduler_svc.rpc.step_encoding import encode_step
from shared.paging import Paging
from shared.sampling_params import Grammar, GrammarKind
from tests.fake_worker import completion, next_token
from tests.scheduler_svc.schedulers import generated, make, make_scheduler, planned
from tests.step_columns import ints

PROMPT = [1, 2, 3]
TOKENS = completion(PROMPT, 12)
WRONG = 999


class Planned(Speculation):
    """Drafts what it is told: `drafts` after each number of tokens."""

    def __init__(self, drafts: dict[int, list[int]], waits: bool) -> None:
        super().__init__()
        self.drafts, self.wants_to_wait = drafts, waits

    def waits(self, decodes: Seq[Sequence], room: int) -> bool:
        return self.wants_to_wait

    def choose(self, decodes: Seq[Sequence], room: int) -> dict[Sequence, Seq[int]]:
        found = {seq: self.drafts.get(seq.num_generated_tokens, [])[:room] for seq in decodes}
        return {seq: drafts for seq, drafts in found.items() if drafts}


def scheduler_with(
    drafts: dict[int, list[int]], num_blocks: int = 16, max_num_seqs: int = 8, waits: bool = False
) -> Scheduler:
    speculation = Planned(drafts, waits)
    return make_scheduler(num_blocks, speculation=speculation, max_num_seqs=max_num_seqs)


def answer(step: Step) -> Answer:
    """The oracle's tokens, after drafted tokens, too."""
    tokens, context = [], list[int]()
    for row in step.rows:
        if row.draft is None:
            context = row.seq.tokens[: row.start + row.num_tokens].tolist()
        else:
            context.append(row.draft)
        tokens.append(next_token(context))
    return Answer(tokens)


def run_step(scheduler: Scheduler) -> tuple[Step, list[Output]]:
    step = planned(scheduler)
    outputs = scheduler.apply(step, answer(step))
    scheduler.check_integrity()
    return step, outputs


@pytest.mark.parametrize(
    ("drafts", "num_accepted"),
    [
        (TOKENS[1:4], 3),
        ([*TOKENS[1:3], WRONG], 2),
        ([TOKENS[1], WRONG, TOKENS[3]], 1),
        ([WRONG, *TOKENS[2:4]], 0),
    ],
)
def test_drafts_hold_as_far_as_they_are_what_is_sampled(
    drafts: list[int], num_accepted: int
) -> None:
    scheduler = scheduler_with({1: drafts})
    seq = make(1, PROMPT, 12)
    scheduler.add(seq)
    run_step(scheduler)
    step, outputs = run_step(scheduler)
    assert [(row.start, row.draft) for row in step.rows] == [
        (3, None),
        *((4 + i, draft) for i, draft in enumerate(drafts)),
    ]
    assert [(each.token, each.offset) for each in outputs] == [
        (TOKENS[1 + i], 1 + i) for i in range(num_accepted + 1)
    ]
    while scheduler.num_running:
        run_step(scheduler)
    assert generated(seq) == TOKENS
    assert (scheduler.stats.draft_tokens, scheduler.stats.accepted_tokens) == (3, num_accepted)
    assert scheduler.blocks.num_free_blocks == 16


def test_no_tokens_are_drafted_after_a_token_that_is_not_known_yet() -> None:
    scheduler = scheduler_with({1: TOKENS[1:3]})
    scheduler.add(make(1, PROMPT, 12))
    planned(scheduler)
    assert [row.draft for row in planned(scheduler).rows] == [None]


def test_nothing_is_drafted_when_it_may_not_be() -> None:
    scheduler = scheduler_with({1: TOKENS[1:4]})
    scheduler.add(make(1, PROMPT, 12))
    run_step(scheduler)
    scheduler.may_draft = False
    assert [row.draft for row in planned(scheduler).rows] == [None]


def test_the_next_step_waits_for_an_answer_if_drafts_are_worth_it() -> None:
    scheduler = scheduler_with({}, waits=True)
    scheduler.add(make(1, PROMPT, 12))
    step = planned(scheduler)
    assert scheduler.schedule() is None
    scheduler.apply(step, answer(step))
    assert scheduler.schedule()


@pytest.mark.parametrize(("num_blocks", "max_num_seqs"), [(16, 1), (2, 8)])
def test_nothing_waits_without_room_for_drafts(num_blocks: int, max_num_seqs: int) -> None:
    """The sequence has the only seat, or the cache has no block but those that it may need."""
    scheduler = scheduler_with({}, num_blocks, max_num_seqs, waits=True)
    scheduler.add(make(1, PROMPT, 5))
    planned(scheduler)
    assert scheduler.schedule()


def test_drafts_leave_rows_and_blocks_to_sequences() -> None:
    scheduler = scheduler_with({1: TOKENS[1:9]}, num_blocks=3, max_num_seqs=4)
    scheduler.add(make(1, PROMPT, 9))
    run_step(scheduler)
    scheduler.add(make(2, PROMPT, 2))
    step = planned(scheduler)
    # Of four rows, one may be the waiting sequence's. Of three blocks, one is kept for a decode.
    assert [row.draft for row in step.rows] == [None, *TOKENS[1:3], None]
    assert len(step.rows[0].seq.blocks.tables[0]) <= 2
    scheduler.apply(step, answer(step))
    scheduler.check_integrity()


def test_each_position_under_a_grammar_has_its_own_mask() -> None:
    grammar = Grammar(GrammarKind.REGEX, "")
    scheduler = scheduler_with({1: TOKENS[1:3]})
    seq = Sequence((0, 1), PROMPT, SamplingParams(12, grammar=grammar))
    masks = [bytes([0, 255 - i]) * 62 + bytes(2) for i in range(4)]
    scheduler.add(seq)
    seq.unpause(masks[:1])
    run_step(scheduler)
    assert scheduler.schedule() is None  # no mask yet
    seq.unpause(masks[1:])
    step = planned(scheduler)
    request = encode_step(step, Paging(4), 1, 1)
    assert ints(request.features.rows).tolist() == [0, 1, 2]
    assert request.features.masks == b"".join(masks[1:])
    scheduler.apply(step, answer(step))
    assert seq.paused
    assert scheduler.schedule() is None


def test_nothing_is_planned_while_drafts_are_in_flight() -> None:
    scheduler = scheduler_with({1: TOKENS[1:3]})
    scheduler.add(make(1, PROMPT, 12))
    run_step(scheduler)
    step = planned(scheduler)
    scheduler.add(make(2, PROMPT, 12))
    assert scheduler.schedule() is None
    scheduler.apply(step, answer(step))
    assert {row.seq.key.number for row in planned(scheduler).rows} == {1, 2}


def test_each_token_comes_with_its_own_log_probabilities() -> None:
    scheduler = scheduler_with({1: [TOKENS[1], WRONG]})
    scheduler.add(Sequence((0, 1), PROMPT, SamplingParams(12, logprobs=0)))
    run_step(scheduler)
    step = planned(scheduler)
    given = [Logprobs(np.full((1, 1), i), np.full((1, 1), float(i))) for i in range(3)]
    outputs = scheduler.apply(step, Answer(answer(step).token_ids, dict(enumerate(given))))
    assert [each.logprobs for each in outputs] == given[:2]
