"""Workers that fail, hang, or contradict each other, and the requests that make them fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import structlog

from scheduler_svc.__main__ import serve
from scheduler_svc.grammar.host_link import HostLink
from scheduler_svc.rpc import worker_client
from scheduler_svc.rpc.worker_group import WorkerMismatchError
from shared.pb import scheduler_pb2, worker_pb2
from tests.fake_worker import Context, FakeWorker, completion, start_worker
from tests.names import name_server
from tests.scheduler_svc.stacks import running, settings_for, stack_of
from tests.waiting import WAIT_S, until


async def test_workers_whose_names_are_not_known_are_found_once_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself, gRPC would look up a name six times in half a minute."""
    monkeypatch.setattr(worker_client, "_REOPEN_S", 0.1)
    server, address = await start_worker(FakeWorker())
    with structlog.testing.capture_logs() as lines:
        async with name_server() as names, asyncio.timeout(WAIT_S):
            name = names.address(address.replace("127.0.0.1", "worker.test"))
            async with running(settings_for(tmp_path, [name], allow_plaintext=True)) as stack:
                await until(lambda: names.num_asked >= 20, "lookups")
                assert not await stack.serving()
                names.known = True
                frontend = await stack.frontend()
                await frontend.complete(1, [1, 2, 3], 6)
    await server.stop(None)
    waiting = next(each for each in lines if each["event"] == "waiting for workers")
    assert waiting["reason"].startswith("errors resolving worker.test:")


def positions(steps: list[worker_pb2.StepRequest]) -> list[int]:
    return [int(each) for step in steps for each in np.frombuffer(step.positions, "<i4")]


async def fail_at(step_id: int, failing: FakeWorker, other: FakeWorker) -> None:
    """Lets a rank fail at a step once the step before it is answered: the next one is sent then."""
    await until(lambda: len(other.steps) > step_id, "the next step")
    failing.may_fail.set()


@pytest.mark.parametrize("failing", [1, 2, 3, 5])
async def test_a_stream_that_breaks_goes_on_after_the_last_answered_step(
    tmp_path: Path, failing: int
) -> None:
    ranks = [FakeWorker(rank=r, world_size=2) for r in range(2)]
    ranks[1].fail_steps = {failing}
    ranks[1].may_fail.clear()
    prompt = list(range(40))  # three steps
    async with stack_of(tmp_path, *ranks) as stack:
        frontend = await stack.frontend()
        await frontend.submit(1, prompt, 6)
        await fail_at(failing, ranks[1], ranks[0])
        await frontend.expect(1, prompt, 6)
        load = await stack.load()
    assert load.lost_tokens == load.preemptions == 0
    for rank in ranks:
        ids = [each.keep_cache_id for each in rank.configured]
        assert ids == ["", rank.info.cache_id]
        answered = [step for step in rank.steps if step.epoch == 1 and step.step_id < failing]
        again = [step for step in rank.steps if step.epoch == 2]
        assert positions(answered) + positions(again) == [*range(40 + 5)]


def loses_its_cache(
    worker: FakeWorker, fails: Callable[[worker_pb2.StepRequest], bool], cache_id: str = ""
) -> Callable[[worker_pb2.StepRequest], bool]:
    """The worker's cache is lost with a step that fails."""

    def fails_and_loses(step: worker_pb2.StepRequest) -> bool:
        failing = fails(step)
        if failing:
            worker.lose_cache(cache_id)
        return failing

    return fails_and_loses


class LosesItLate(FakeWorker):
    """A worker that finds only when it is configured that it has not kept its cache."""

    async def Configure(
        self, request: worker_pb2.ConfigureRequest, context: Context
    ) -> worker_pb2.ConfigureResponse:
        if request.keep_cache_id:
            self.lose_cache()
        return await super().Configure(request, context)


@pytest.mark.parametrize("cache_id", ["", "another", "late"])
async def test_all_ranks_begin_with_an_empty_cache_if_one_has_lost_its_own(
    tmp_path: Path, cache_id: str
) -> None:
    ranks = [FakeWorker(rank=0, world_size=2)]
    if cache_id == "late":
        ranks.append(LosesItLate(rank=1, world_size=2))
        ranks[1].fail_steps = {4}
    else:
        ranks.append(FakeWorker(rank=1, world_size=2))
        ranks[1].fails = loses_its_cache(
            ranks[1], lambda step: (step.epoch, step.step_id) == (1, 4), cache_id
        )
    ranks[1].may_fail.clear()
    async with stack_of(tmp_path, *ranks) as stack:
        frontend = await stack.frontend()
        await frontend.submit(1, [1, 2, 3], 9)
        await fail_at(4, ranks[1], ranks[0])
        await frontend.expect(1, [1, 2, 3], 9)
        load = await stack.load()
    assert load.lost_tokens == 3 + 2
    for rank in ranks:
        assert not rank.configured[-1].keep_cache_id
        last = [step for step in rank.steps if step.epoch == rank.info.epoch]
        assert positions(last) == [0, *range(3 + 8)]  # one proves that the ranks can run a step


async def test_a_cache_is_not_kept_after_a_second_loss_with_it(tmp_path: Path) -> None:
    worker = FakeWorker()
    worker.fails = lambda step: (step.epoch, step.step_id) in {(1, 4), (2, 1)}
    async with stack_of(tmp_path, worker) as stack:
        frontend = await stack.frontend()
        await frontend.complete(1, [1, 2, 3], 9)
    assert [bool(each.keep_cache_id) for each in worker.configured] == [False, True, False]


def poisoned_by(token: int) -> Callable[[worker_pb2.StepRequest], bool]:
    return lambda step: token in np.frombuffer(step.input_ids, "<i4")


async def test_a_poisoned_request_ends_alone(tmp_path: Path) -> None:
    worker = FakeWorker()
    worker.fails = poisoned_by(77)
    prompts = {n: [n, 77 if n == 3 else 7] for n in range(1, 6)}
    async with stack_of(tmp_path, worker) as stack:
        frontend = await stack.frontend()
        for number, prompt in prompts.items():
            await frontend.submit(number, prompt, 20)
        await frontend.read_until_finished(*prompts)
        assert frontend.finished[3].cause == scheduler_pb2.FINISH_CAUSE_INTERNAL
        assert frontend.finished[3].message == "internal error"
        for number in prompts.keys() - {3}:
            assert frontend.tokens[number] == completion(prompts[number], 20)
        load = await stack.load()
        assert load.blocks_free + load.blocks_cached == load.blocks


async def test_a_suspect_that_is_aborted_on_trial_delays_no_other_request(tmp_path: Path) -> None:
    worker = FakeWorker()
    worker.fails = poisoned_by(77)
    async with stack_of(tmp_path, worker) as stack:
        frontend = await stack.frontend()
        await frontend.submit(1, [77], 3)
        while not any(step.epoch == 3 for step in worker.steps):
            await worker.step_arrived.wait()
            worker.step_arrived.clear()
        await frontend.abort(1)
        await frontend.complete(2, [1], 3)


async def test_workers_that_fail_at_everything_end_no_request(tmp_path: Path) -> None:
    worker = FakeWorker()
    async with stack_of(tmp_path, worker) as stack:
        frontend = await stack.frontend()
        assert await stack.serving()
        worker.fails = lambda _: True
        await frontend.submit(1, [1], 3)
        while len({step.epoch for step in worker.steps}) < 4:
            await worker.step_arrived.wait()
            worker.step_arrived.clear()
        assert not await stack.serving()
        worker.fails = lambda _: False
        await frontend.expect(1, [1], 3)
        while not await stack.serving():
            pass
        assert frontend.states[:2] == [True, False]
        while frontend.states[-1:] != [True]:
            await frontend.read()


async def test_a_rank_that_answers_nothing_is_given_up(tmp_path: Path) -> None:
    """Like a stopped process: its step does not end, and GetInfo is not answered."""
    ranks = [FakeWorker(rank=r, world_size=2) for r in range(2)]
    async with stack_of(tmp_path, *ranks, hang_timeout_s=1) as stack:
        frontend = await stack.frontend()
        ranks[1].gate.clear()
        ranks[1].answers_info.clear()
        await frontend.submit(1, [1, 2], 9)
        while await stack.serving():
            pass
        ranks[1].gate.set()
        ranks[1].answers_info.set()
        await frontend.expect(1, [1, 2], 9)
    assert {step.epoch for step in ranks[0].steps} >= {1, 2}


class SilentOnceRecovered(FakeWorker):
    """A worker that stops answering once it is configured for epoch 2."""

    async def Configure(
        self, request: worker_pb2.ConfigureRequest, context: Context
    ) -> worker_pb2.ConfigureResponse:
        if request.epoch == 2:
            self.num_infos = 0
            self.gate.clear()
            self.answers_info.clear()
        return await super().Configure(request, context)


async def test_a_rank_that_falls_silent_in_its_first_step_is_given_up(tmp_path: Path) -> None:
    """That is the step that proves a recovery."""
    worker = SilentOnceRecovered()
    worker.fails = loses_its_cache(worker, lambda step: step.epoch == 1)
    async with stack_of(tmp_path, worker, hang_timeout_s=1) as stack:
        frontend = await stack.frontend()
        await frontend.submit(1, [1, 2], 9)
        while worker.num_infos < 2 or worker.gate.is_set():  # asked in vain, then again
            await stack.load()
        worker.gate.set()
        worker.answers_info.set()
        await frontend.expect(1, [1, 2], 9)
    assert worker.steps[-1].epoch > 2


async def test_a_slow_step_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_client, "_POLL_SHARE", 0.001)
    worker = FakeWorker()
    async with stack_of(tmp_path, worker, hang_timeout_s=30) as stack:
        frontend = await stack.frontend()
        worker.gate.clear()
        await frontend.submit(1, [1, 2], 9)
        await worker.step_arrived.wait()
        worker.num_infos = 0
        while worker.num_infos < 10:  # the scheduler keeps looking
            await stack.load()
        worker.gate.set()
        await frontend.expect(1, [1, 2], 9)
    assert {step.epoch for step in worker.steps} == {1}


async def test_workers_lost_while_there_is_nothing_to_do_are_found_again(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/w.sock"
    server, _ = await start_worker(FakeWorker(), address)
    async with running(settings_for(tmp_path, [address], hang_timeout_s=5)) as stack:
        frontend = await stack.frontend()
        await server.stop(None)
        while await stack.serving():
            pass
        worker = FakeWorker()
        server, _ = await start_worker(worker, address)
        while not await stack.serving():
            pass
        assert {step.epoch for step in worker.steps} == {2}  # ready before anything is asked
        await frontend.complete(1, [1, 2], 9)
    await server.stop(None)


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        ([(0, 2, ""), (0, 2, "")], "rank 1 of 2 expected"),
        ([(0, 1, ""), (1, 1, "")], "rank 0 of 2 expected"),
        ([(0, 2, "f0"), (1, 2, "f1")], "model_fingerprint: f0 on rank 0, f1 on rank 1"),
    ],
)
async def test_ranks_that_contradict_each_other_stop_the_service(
    tmp_path: Path, workers: list[tuple[int, int, str]], message: str
) -> None:
    started = [
        await start_worker(FakeWorker(rank=rank, world_size=size, fingerprint=fingerprint))
        for rank, size, fingerprint in workers
    ]
    link = HostLink.create()
    try:
        with pytest.raises(WorkerMismatchError, match=message):
            await serve(settings_for(tmp_path, [address for _, address in started]), link=link)
    finally:
        link.close()
        for server, _ in started:
            await server.stop(None)
