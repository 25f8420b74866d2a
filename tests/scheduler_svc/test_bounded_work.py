"""What a burst may have the scheduler's loop do in a turn."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from scheduler_svc.core.admission import MAX_BEAM_TOKENS, sampling_problem
from scheduler_svc.core.forks import beam_search
from scheduler_svc.core.forks.beam_search import BeamSearch
from scheduler_svc.core.sampling import SamplingParams
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence, Started
from scheduler_svc.core.step import Output
from scheduler_svc.rpc import connection as connection_module
from scheduler_svc.rpc import servicer
from scheduler_svc.rpc.connection import FrontendConnection
from shared.pb import scheduler_pb2
from tests.fake_worker import FakeWorker
from tests.scheduler_svc.stacks import stack_of
from tests.turns import counting_turns


class Written:
    """Stands in for a frontend's stream."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.enough = asyncio.Event()

    async def write(self, message: scheduler_pb2.SchedulerMessage) -> None:
        self.sizes.append(len(message.step_output.token_ids) // 4)
        if sum(self.sizes) == 10_000:
            self.enough.set()
        await asyncio.sleep(0)


async def test_outputs_that_piled_up_leave_in_slices() -> None:
    seq = Sequence((0, 1), [1], SamplingParams(max_tokens=10_001))
    seq.started = Started(0.0, 0)
    connection, written = FrontendConnection(0), Written()
    for offset in range(10_000):
        connection.add(Output(seq, 7, offset))
    writer: Any = asyncio.create_task(connection.write_to(written))  # type: ignore[arg-type]
    async with asyncio.timeout(60):
        await written.enough.wait()
    writer.cancel()
    assert max(written.sizes) == connection_module._OUTPUTS_AT_ONCE
    assert sum(written.sizes) == 10_000


async def test_a_lost_frontends_sequences_end_in_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Scheduler.abort
    with counting_turns() as turns:

        def abort(self: Scheduler, key: Any) -> None:
            turns.done(1)
            real(self, key)

        monkeypatch.setattr(Scheduler, "abort", abort)
        async with stack_of(tmp_path, FakeWorker(), max_num_seqs=4) as stack:
            frontend = await stack.frontend()
            for number in range(500):
                await frontend.submit(number, [number % 50 + 1] * 5, max_tokens=40)
            await stack.until(lambda load: load.waiting > 400)
            frontend._call.cancel()
            await stack.until(lambda load: load.waiting == load.running == 0)
    assert turns.total > 400
    assert turns.max <= servicer._ABORTS_AT_ONCE


def test_beams_of_any_length_take_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step looks at the tokens that the beams have already."""
    gathered = []
    real = beam_search._token_ids
    monkeypatch.setattr(beam_search, "_token_ids", lambda path: gathered.append(1) or real(path))
    params = SamplingParams(2000, beam_width=4, stop_token_ids=frozenset({0, 1}))
    search = BeamSearch(params)
    found = (list(range(2, 16)), [-1.0] * 14)
    while chosen := search.advance([found] * len(search._live)):
        assert len(chosen) == 4
    assert not gathered
    assert [len(each.token_ids) for each in search.hypotheses] == [2000] * 4
    assert gathered


def test_beam_searches_that_would_take_too_long_are_refused() -> None:
    ends = frozenset(range(66))
    params = SamplingParams(
        max_tokens=9, beam_width=16, stop_token_ids=ends, logprobs=None, temperature=0.0
    )
    assert sampling_problem(params, 151_936) == (
        "sampling.beam_width: 16 beams with 66 tokens that end them need 1138 candidates; "
        "the limit is 1000"
    )
    params = SamplingParams(max_tokens=10_000, beam_width=16, temperature=0.0)
    assert sampling_problem(params, 151_936) == (
        "sampling.beam_width: 16 beams of up to 10000 tokens, sampling.max_tokens or what fits the "
        f"model; the limit is {MAX_BEAM_TOKENS} tokens"
    )
    assert not sampling_problem(
        SamplingParams(max_tokens=8192, beam_width=16, temperature=0.0), 151_936
    )
