"""Beam search over the scheduler's sequences. The sanitizer checks the blocks; the completions are
compared with those of the bare search."""

from __future__ import annotations

from collections import deque
from random import Random

import pytest

from scheduler_svc.core.admission import Limits
from scheduler_svc.core.blocks.block_manager import BlockManager
from scheduler_svc.core.client import Client
from scheduler_svc.core.forks.beam_search import BeamSearch, _token_ids
from scheduler_svc.core.sampling import SamplingParams
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import FinishCause, Request, Sequence
from scheduler_svc.core.step import End, Output, Step
from scheduler_svc.rpc.step_encoding import encode_step, read_answer
from shared.paging import Paging
from shared.pb import worker_pb2
from tests.oracle import VOCAB_SIZE, completion, logprobs, states
from tests.sanitizer import Limits as StepLimits
from tests.sanitizer import Sanitizer

BLOCK_SIZE = 4
Found = dict[int, tuple[list[int], FinishCause | None]]


class Rig:
    """A scheduler and a worker, with up to `ahead` steps sent before an answer arrives."""

    def __init__(self, num_blocks: int, max_num_seqs: int, ahead: int) -> None:
        limits = Limits(max_num_seqs, 24, num_blocks * BLOCK_SIZE, 100, VOCAB_SIZE)
        self.scheduler = Scheduler(limits, BlockManager(num_blocks, Paging(BLOCK_SIZE)))
        self._worker_limits = StepLimits(max_num_seqs, 24, limits.max_model_len)
        self._num_blocks = num_blocks
        self._ahead = ahead
        self._in_flight: deque[tuple[Step, worker_pb2.StepRequest]] = deque()
        self.outputs: list[Output] = []
        self._epoch = 0
        self.lose_cache()

    def lose_workers(self, random: Random) -> None:
        """Loses the steps in flight, but not the cache."""
        answered = self._step_id - len(self._in_flight)
        for _, request in self._in_flight:
            self._worker.run(request)
        self._epoch += 1
        self._step_id = 0
        self._in_flight.clear()
        self.scheduler.rewind_all()
        self.scheduler.check_integrity()
        self._worker.keep(self._epoch, answered, random)

    def lose_cache(self) -> None:
        self._epoch += 1
        self._step_id = 0
        self._in_flight.clear()
        if self._epoch > 1:
            self.scheduler.requeue_all()
        self._worker = Sanitizer(
            self._worker_limits, self._num_blocks, Paging(BLOCK_SIZE), self._epoch
        )

    def turn(self) -> bool:
        """Sends what it can and applies one answer. Returns False once nothing is left to do."""
        while len(self._in_flight) <= self._ahead and (step := self.scheduler.schedule()):
            self._step_id += 1
            request = encode_step(step, Paging(BLOCK_SIZE), self._epoch, self._step_id)
            self._in_flight.append((step, request))
        if not self._in_flight:
            return False
        step, request = self._in_flight.popleft()
        answer = read_answer(request, self._worker.run(request))
        self.outputs += self.scheduler.apply(step, answer)
        self.scheduler.check_integrity()
        return True

    def run(self) -> Found:
        while self.turn():
            pass
        assert not self.scheduler.open_sequences(), "something waits forever"
        assert self.scheduler.blocks.num_free_blocks == self._num_blocks
        return self.found()

    def found(self) -> Found:
        found: Found = {}
        for output in self.outputs:
            tokens, cause = found.get(output.seq.key.number, ([], None))
            assert cause is None, "an output after the end"
            if output.token is not None:
                assert output.offset == len(tokens)
                tokens.append(output.token)
            found[output.seq.key.number] = tokens, output.end and output.end.cause
        return found


def search(prompt: list[int], params: SamplingParams) -> list[tuple[list[int], FinishCause]]:
    """The completions that the bare search finds, without a scheduler."""
    beams = BeamSearch(params)
    k = params.num_logprobs or 0
    while beams._live:
        live = [_token_ids(beam.path) for beam in beams._live]
        after = [logprobs(states([*prompt, *ids])[-1], 0, k) for ids in live]
        beams.advance([(ids[1:], values[1:]) for ids, values in after])
    return [
        (
            list(h.token_ids),
            FinishCause.EOS
            if h.token_ids[-1] in params.eos_token_ids
            else FinishCause.STOP_TOKEN
            if h.token_ids[-1] in params.stop_token_ids
            else FinishCause.LENGTH,
        )
        for h in beams.hypotheses
    ]


def random_params(random: Random) -> SamplingParams:
    max_tokens = random.randint(1, 12)
    some = [random.randrange(VOCAB_SIZE) for _ in range(random.choice([0, 0, 1, 40]))]
    return SamplingParams(
        max_tokens,
        beam_width=random.randint(1, 5),
        length_penalty=random.choice([-1.0, 0.0, 1.0, 2.0]),
        eos_token_ids=frozenset(some[::2]),
        stop_token_ids=frozenset(some[1::2]),
        min_tokens=random.choice([0, 0, random.randint(0, max_tokens)]),
    )


@pytest.mark.parametrize("seed", range(60))
def test_the_completions_are_those_of_the_search_alone(seed: int) -> None:
    """Alongside plain sequences, in caches too small for all, and with losses."""
    random = Random(seed)
    rig = Rig(random.choice([12, 16, 100]), random.choice([2, 4, 8, 30]), random.choice([0, 1]))
    beams, plain = {}, {}
    for request in range(random.randint(1, 4)):
        prompt = [random.randrange(3) for _ in range(random.randint(1, 14))]
        params = random_params(random)
        beams[10 * request] = prompt, params
        seq = Sequence(
            (0, 10 * request), prompt, params, Request(priority=random.choice([0, 0, 1]))
        )
        assert rig.scheduler.add(seq) is None
    for number in range(1000, 1000 + random.randint(0, 4)):
        plain[number] = [random.randrange(3) for _ in range(random.randint(1, 14))]
        seq = Sequence((0, number), plain[number], SamplingParams(random.randint(1, 20)))
        assert rig.scheduler.add(seq) is None
    for _ in range(random.choice([0, 0, 1, 2])):
        for _ in range(random.randint(1, 12)):
            rig.turn()
        if random.random() < 0.5:
            rig.lose_cache()
        else:
            rig.lose_workers(random)
    found = rig.run()
    for number, (prompt, params) in beams.items():
        expected = search(prompt, params)
        assert len(expected) == params.beam_width
        assert [found.pop(number + i) for i in range(len(expected))] == expected, f"seed {seed}"
    for number, prompt in plain.items():
        tokens, cause = found.pop(number)
        assert tokens == completion(prompt, len(tokens))
        assert cause is FinishCause.LENGTH
    assert not found


def test_the_best_comes_first_and_has_a_score() -> None:
    rig = Rig(64, 8, ahead=1)
    rig.scheduler.add(Sequence((0, 1), [1, 2], SamplingParams(6, beam_width=3)))
    rig.run()
    scores = [output.end.score for output in rig.outputs if isinstance(output.end, End)]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("turns", range(8))
@pytest.mark.parametrize("ahead", [0, 1])
def test_all_beams_end_together(turns: int, ahead: int) -> None:
    """Whether aborted by any beam's number or ended by a deadline."""
    for how in ("abort", "deadline"):
        rig = Rig(16, 3, ahead)
        params = SamplingParams(20, beam_width=4)
        rig.scheduler.add(Sequence((0, 1), [1, 2, 3], params, Request(deadline=5.0)))
        for _ in range(turns):
            rig.turn()
        if how == "deadline":
            rig.outputs += rig.scheduler.expire(5.0)
        else:
            for number in range(1, 5):
                rig.scheduler.abort((0, number))
        expected = [FinishCause.DEADLINE] * 4 if how == "deadline" else []
        assert [cause for _, cause in rig.run().values()] == expected


def test_a_beam_that_fails_for_good_ends_the_search() -> None:
    rig = Rig(64, 8, ahead=0)
    rig.scheduler.add(Sequence((0, 1), [1, 2, 3], SamplingParams(20, beam_width=3)))
    for _ in range(3):
        rig.turn()
    step = rig.scheduler.schedule()
    assert step is not None
    rig.outputs += rig.scheduler.fail(step.rows[0].seq, "broken")
    rig.lose_cache()
    assert [cause for _, cause in rig.run().values()] == [FinishCause.INTERNAL] * 3


def test_the_prompt_is_computed_once_and_a_lone_successor_copies_nothing() -> None:
    rig = Rig(64, 8, ahead=0)
    rig.scheduler.add(Sequence((0, 1), [1] * 10, SamplingParams(8, beam_width=1)))
    rig.run()
    assert rig.scheduler.stats.step_tokens == 10 + 7
    wide = Rig(64, 8, ahead=0)
    wide.scheduler.add(Sequence((0, 1), [1] * 10, SamplingParams(8, beam_width=4)))
    wide.run()
    assert wide.scheduler.stats.step_tokens == 10 + 4 * 7


@pytest.mark.parametrize(("slots", "steps_per_token"), [(6, 1), (5, 2), (3, 2), (2, 3), (1, 6)])
def test_beams_without_a_slot_run_once_the_others_have_their_candidates(
    slots: int, steps_per_token: int
) -> None:
    rig = Rig(64, slots, ahead=0)
    rig.scheduler.add(Sequence((0, 1), [1] * 6, SamplingParams(8, beam_width=6)))
    rig.run()
    assert rig.scheduler.stats.steps == 1 + 7 * steps_per_token


def test_a_search_without_a_slot_for_each_beam_does_not_wait_for_other_sequences() -> None:
    rig = Rig(64, 3, ahead=1)
    rig.scheduler.add(Sequence((0, 1), [1, 2], SamplingParams(90)))
    rig.scheduler.add(Sequence((0, 10), [1, 2, 3], SamplingParams(8, beam_width=3)))
    while 12 not in rig.found():
        assert rig.turn()
    assert rig.scheduler.open_sequences() == [(0, 1)]
    rig.run()


def test_beams_with_candidates_keep_their_blocks_while_the_others_run() -> None:
    rig = Rig(64, 8, ahead=0)
    rig.scheduler.add(Sequence((0, 1), [1] * 7, SamplingParams(8, beam_width=3)))
    for _ in range(3):
        rig.turn()
    rig.lose_cache()  # three contexts of 10 tokens are left to compute, 24 tokens in a step
    rig.run()
    assert rig.scheduler.stats.preemptions == 3
    assert rig.scheduler.stats.steps == 3 + 2 + 4


def test_beams_with_candidates_wait_on_when_the_workers_are_lost() -> None:
    rig = Rig(64, 8, ahead=0)
    prompt, params = [1] * 7, SamplingParams(8, beam_width=3)
    rig.scheduler.add(Sequence((0, 1), prompt, params))
    for _ in range(3):
        rig.turn()
    rig.lose_cache()
    rig.turn()  # computes two contexts and a part of the third
    rig.lose_workers(Random(0))
    assert list(rig.run().values()) == search(prompt, params)


def test_each_beams_tokens_are_its_clients() -> None:
    rig = Rig(num_blocks=60, max_num_seqs=8, ahead=1)
    client = Client("acme", output_tokens_per_minute=20)

    def seq(number: int) -> Sequence:
        params = SamplingParams(8, beam_width=4, length_penalty=1.0)
        return Sequence((0, number), [1, 2, 3], params, Request(client=client))

    assert rig.scheduler.add(seq(1)) is None
    rig.run()
    refused = rig.scheduler.add(seq(10))
    # The first step samples for the prompt, the seven that follow for four beams each.
    assert refused
    assert refused.retry_after_s == pytest.approx((1 + 7 * 4 - 20) * 3)


def test_the_numbers_of_all_beams_are_taken_until_the_search_ends() -> None:
    rig = Rig(num_blocks=16, max_num_seqs=4, ahead=1)
    params = SamplingParams(3, beam_width=3)
    assert rig.scheduler.add(Sequence((0, 10), [1, 2], params)) is None

    def refusal(number: int) -> str:
        end = rig.scheduler.add(Sequence((0, number), [3], SamplingParams(2)))
        return end.message if end else ""

    assert refusal(12) == "request: its number is in use"
    assert refusal(9) == refusal(13) == ""
    while rig.turn():
        pass
    assert refusal(12) == ""
