"""Runs of steps, and what a cut leaves of them."""

from __future__ import annotations

import asyncio

import pytest

from shared.pb.worker_pb2 import StepRequest
from tests.waiting import until
from tests.worker_svc.serving import INVALID, Device, Gate, Worker, end_of, rejected, tokens
from worker_svc.execution import Execution, Launch


async def test_a_run_has_the_tokens_of_its_steps_one_by_one(worker: Worker) -> None:
    batch = await worker.configure(1)
    prompt = batch.request([(0, [1, 2, 3]), (1, [4])])
    steps = [batch.request([(0, [-1]), (1, [-2])], temperatures=[0, 1.0]) for _ in range(4)]
    call = await worker.execute(prompt, *steps)
    expected = [tokens(await call.read()) for _ in range(5)]
    call.cancel()

    await worker.configure(2)
    run = StepRequest()
    run.CopyFrom(steps[0])
    run.num_steps = 4
    run.block_table, run.block_table_offsets = steps[-1].block_table, steps[-1].block_table_offsets
    for request in (prompt, run):
        request.epoch = 2
    call = await worker.execute(prompt, run)
    answers = [await call.read() for _ in range(5)]
    assert [answer.step_id for answer in answers] == [1, 2, 3, 4, 5]
    assert [tokens(answer) for answer in answers] == expected
    call.cancel()


async def test_a_cut_drops_the_steps_that_have_not_begun(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, dropped = Gate(monkeypatch), asyncio.Semaphore(0)
    drop = Execution.drop

    def noted_drop(execution: Execution, launch: Launch) -> None:
        drop(execution, launch)
        dropped.release()

    monkeypatch.setattr(Execution, "drop", noted_drop)
    batch = await worker.configure(1)
    run = batch.request([(0, [1])])
    run.num_steps = 4
    call = await worker.execute(run)
    assert await asyncio.to_thread(gate.begun.wait, 30)
    await call.write(StepRequest(epoch=1, cut=True))
    batch.step_id = 4
    await call.write(batch.request([(1, [5, 6])]))
    for _ in range(4):
        await dropped.acquire()
    gate.open.set()
    answers = [await call.read() for _ in range(5)]
    assert [answer.step_id for answer in answers] == [1, 2, 3, 4, 5]
    assert [answer.dropped for answer in answers] == [False, True, True, True, False]
    assert gate.step_ids == [1, 5]

    # The token of a step that was perhaps dropped is no input.
    await call.write(StepRequest(epoch=1, cut=True))
    await call.write(batch.request([(1, [-1])]))
    assert "sampled nothing" in await rejected(end_of(call), INVALID)


async def test_a_device_holds_the_next_step_and_no_more(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a cut would drop nothing, and a new prompt would wait for the whole run."""
    device, batch = Device(monkeypatch), await worker.configure(1)
    run = batch.request([(0, [1])])
    run.num_steps = 4
    call = await worker.execute(run)
    first, second = await device.next_step(), await device.next_step()
    first.finish()
    assert not (await call.read()).dropped
    third = await device.next_step()
    await call.write(StepRequest(epoch=1, cut=True))
    batch.step_id = 4
    await call.write(batch.request([(1, [5, 6])]))
    waiting = worker.service.execution._waiting
    await until(lambda: [each.step.step_id for each in waiting] == [5], "the prompt")
    second.finish()
    third.finish()
    (await device.next_step()).finish()
    answers = [await call.read() for _ in range(4)]
    assert [answer.step_id for answer in answers] == [2, 3, 4, 5]
    assert [answer.dropped for answer in answers] == [False, False, True, False]
    call.cancel()
