"""The scheduler service over real gRPC, with fake workers below and a raw frontend above."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
import structlog
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from frontend.engines.messages import suspects_message
from scheduler_svc.__main__ import serve
from scheduler_svc.grammar.host_link import HostLink
from scheduler_svc.rpc import worker_client
from scheduler_svc.rpc.worker_group import WorkerMismatchError
from scheduler_svc.settings import SchedulerSettings
from shared.config import load_settings
from shared.pb import scheduler_pb2, worker_pb2
from shared.pb.scheduler_pb2_grpc import SchedulerServiceStub
from tests.fake_worker import FakeWorker, completion, start_worker
from tests.names import name_server
from tests.oracle import logprobs, states
from tests.waiting import WAIT_S, until

if TYPE_CHECKING:
    from shared.pb.scheduler_pb2_grpc import SchedulerServiceAsyncStub


Row = tuple[list[int], list[float]]


class Frontend:
    """Speaks the frontend's side of one `Connect` stream and collects what arrives."""

    def __init__(self, stub: SchedulerServiceAsyncStub) -> None:
        self._call = stub.Connect()
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.started: dict[int, scheduler_pb2.Started] = {}
        self.finished: dict[int, scheduler_pb2.Finished] = {}
        self.info = scheduler_pb2.EngineInfo()
        self.states: list[bool] = []
        self.trials: list[scheduler_pb2.Trial] = []
        # By request and position: ids and values.
        self.logprobs: dict[int, dict[int, Row]] = defaultdict(dict)
        self.prompt_logprobs: dict[int, dict[int, Row]] = defaultdict(dict)

    async def connect(self) -> Frontend:
        self.info = (await self._call.read()).engine_info
        return self

    async def submit(
        self,
        request: int,
        prompt: Sequence[int],
        max_tokens: int = 5,
        sampling: scheduler_pb2.TokenSampling | None = None,
        **fields: object,
    ) -> None:
        sampling = sampling or scheduler_pb2.TokenSampling(max_tokens=max_tokens)
        submit = scheduler_pb2.Submit(
            request=request,
            prompt_ids=np.array(prompt, "<i4").tobytes(),
            sampling=sampling,
            **fields,  # type: ignore[arg-type]
        )
        await self._call.write(scheduler_pb2.FrontendMessage(submit=submit))

    async def announce_names(self) -> None:
        await self._call.write(scheduler_pb2.FrontendMessage(names_clients=True))

    async def abort(self, request: int) -> None:
        message = scheduler_pb2.FrontendMessage(abort=scheduler_pb2.Abort(request=request))
        await self._call.write(message)

    async def tell_suspects(
        self, losses: Mapping[int, int], cleared: Sequence[int] = (), *, holding: bool = False
    ) -> None:
        await self._call.write(suspects_message(losses, cleared, holding=holding))

    async def next_trial(self) -> scheduler_pb2.Trial:
        while not self.trials:
            await self.read()
        return self.trials.pop(0)

    async def read(self) -> None:
        """Takes in the next message; every token must arrive in order."""
        message = await self._call.read()
        assert isinstance(message, scheduler_pb2.SchedulerMessage), await self._call.details()
        if message.HasField("engine_state"):
            self.states.append(message.engine_state.serving)
        if message.HasField("trial"):
            self.trials.append(message.trial)
        output = message.step_output
        columns = (
            np.frombuffer(output.requests, "<u8").tolist(),
            np.frombuffer(output.offsets, "<i4").tolist(),
            np.frombuffer(output.token_ids, "<i4").tolist(),
        )
        for request, offset, token in zip(*columns, strict=True):
            assert offset == len(self.tokens[request])
            self.tokens[request].append(token)
        for rows in output.logprobs:
            ids = np.frombuffer(rows.token_ids, "<i4").reshape(-1, rows.width).tolist()
            values = np.frombuffer(rows.values, "<f4").reshape(-1, rows.width).tolist()
            found = self.prompt_logprobs if rows.prompt else self.logprobs
            for i, row in enumerate(zip(ids, values, strict=True)):
                assert rows.first + i not in found[rows.request], "delivered twice"
                found[rows.request][rows.first + i] = row
        for started in output.started:
            assert started.request not in self.started
            assert self.tokens[started.request]
            self.started[started.request] = started
        for finished in output.finished:
            assert finished.request not in self.finished
            self.finished[finished.request] = finished

    async def read_until_finished(self, *requests: int) -> None:
        while not self.finished.keys() >= set(requests):
            await self.read()

    async def failure(self) -> aio.AioRpcError:
        with pytest.raises(aio.AioRpcError) as raised:
            await self._read_states()
        return raised.value

    async def _read_states(self) -> None:
        while True:
            message: Any = await self._call.read()
            assert message.HasField("engine_state")

    def close(self) -> None:
        self._call.cancel()


class Stack:
    def __init__(self, address: str) -> None:
        self.address = address
        self.channel = aio.insecure_channel(address)
        self.stub: SchedulerServiceAsyncStub = SchedulerServiceStub(self.channel)

    async def frontend(self) -> Frontend:
        return await Frontend(self.stub).connect()

    async def load(self) -> scheduler_pb2.GetLoadResponse:
        return await self.stub.GetLoad(scheduler_pb2.GetLoadRequest(), wait_for_ready=True)

    async def serving(self) -> bool:
        health = health_pb2_grpc.HealthStub(self.channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def until(self, condition: Callable[[scheduler_pb2.GetLoadResponse], bool]) -> None:
        while not condition(await self.load()):
            pass


StartStack = Callable[..., Awaitable[Stack]]


@asynccontextmanager
async def running(settings: SchedulerSettings) -> AsyncIterator[Stack]:
    link = HostLink.create()  # with nobody at its other end
    task = asyncio.create_task(serve(settings, link=link))
    stack = Stack(settings.scheduler_address)
    try:
        yield stack
    finally:
        await stack.channel.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        link.close()


def settings_for(tmp_path: Path, addresses: list[str], **values: object) -> SchedulerSettings:
    flags = {
        "scheduler_address": f"unix:{tmp_path}/s.sock",
        "worker_addresses": ",".join(addresses),
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        **values,
    }
    args = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
    return load_settings(SchedulerSettings, args)


@asynccontextmanager
async def stack_of(tmp_path: Path, *workers: FakeWorker, **values: object) -> AsyncIterator[Stack]:
    servers, addresses = zip(*[await start_worker(w) for w in workers], strict=True)
    try:
        async with running(settings_for(tmp_path, list(addresses), **values)) as stack:
            yield stack
    finally:
        for server in servers:
            await server.stop(None)
    assert not any(worker.violations for worker in workers)


async def test_mixed_requests_get_the_tokens_of_the_oracle(tmp_path: Path) -> None:
    prompts = {n: [n, *range(n * 3)] for n in range(1, 12)}
    async with stack_of(tmp_path, FakeWorker()) as stack:
        frontend = await stack.frontend()
        for number, prompt in prompts.items():
            await frontend.submit(number, prompt, max_tokens=number + 3)
        await frontend.read_until_finished(*prompts)
        for number, prompt in prompts.items():
            assert frontend.tokens[number] == completion(prompt, number + 3)
            assert frontend.finished[number].cause == scheduler_pb2.FINISH_CAUSE_LENGTH
        load = await stack.load()
        assert load.running == load.waiting == 0
        assert load.blocks_free + load.blocks_cached == load.blocks == 64
        assert load.sampled_tokens == sum(n + 3 for n in prompts)


async def test_engine_info_comes_first_and_names_the_capacity(tmp_path: Path) -> None:
    worker = FakeWorker(num_blocks=6, block_size=8, max_model_len=100)
    async with stack_of(tmp_path, worker, max_waiting=7) as stack:
        info = (await stack.frontend()).info
        assert (info.num_blocks, info.block_size, info.max_waiting) == (6, 8, 7)
        assert info.max_model_len == 48  # the cache holds less than the model could
        assert info.tensor_parallel_size == 1


async def test_all_ranks_get_every_step_and_the_smallest_cache_counts(tmp_path: Path) -> None:
    ranks = [FakeWorker(num_blocks=20 - r, rank=r, world_size=2) for r in range(2)]
    async with stack_of(tmp_path, *ranks) as stack:
        frontend = await stack.frontend()
        assert frontend.info.num_blocks == 19
        assert frontend.info.tensor_parallel_size == 2
        await frontend.submit(1, [1, 2, 3], 6)
        await frontend.read_until_finished(1)
        assert frontend.tokens[1] == completion([1, 2, 3], 6)
        assert ranks[0].steps == ranks[1].steps


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
                await frontend.submit(1, [1, 2, 3], 6)
                await frontend.read_until_finished(1)
                assert frontend.tokens[1] == completion([1, 2, 3], 6)
    await server.stop(None)
    waiting = next(each for each in lines if each["event"] == "waiting for workers")
    assert waiting["reason"].startswith("errors resolving worker.test:")


async def test_a_prefix_is_computed_once(tmp_path: Path) -> None:
    async with stack_of(tmp_path, FakeWorker()) as stack:
        frontend = await stack.frontend()
        for request in (1, 2):
            await frontend.submit(request, range(12), 3)
            await frontend.read_until_finished(request)
        assert frontend.started[1].cached_prompt_tokens == 0
        assert frontend.started[2].cached_prompt_tokens == 8
        assert frontend.tokens[2] == completion(range(12), 3)


async def test_abort_and_a_lost_connection_free_the_blocks(tmp_path: Path) -> None:
    worker = FakeWorker()
    async with stack_of(tmp_path, worker) as stack:
        frontend, other = await stack.frontend(), await stack.frontend()
        worker.gate.clear()
        await frontend.submit(1, range(9), 100)
        await frontend.submit(2, range(9), 100)
        await other.submit(1, range(5), 8)
        await stack.until(lambda load: load.running + load.waiting == 3)
        await frontend.abort(1)
        await stack.until(lambda load: load.running + load.waiting == 2)
        frontend.close()
        await stack.until(lambda load: load.running + load.waiting == 1)
        worker.gate.set()
        await other.read_until_finished(1)
        assert other.tokens[1] == completion(range(5), 8)
        load = await stack.load()
        assert load.blocks_free + load.blocks_cached == load.blocks


async def test_a_frontend_that_goes_leaves_the_others_alone(tmp_path: Path) -> None:
    worker = FakeWorker()
    async with stack_of(tmp_path, worker) as stack:
        frontends = [await stack.frontend() for _ in range(3)]
        worker.gate.clear()
        for frontend in frontends:
            await frontend.submit(1, [1, 2, 3], 5)
        await worker.step_arrived.wait()
        await stack.until(lambda load: load.waiting + load.running == 3)
        frontends[1].close()
        await stack.until(lambda load: load.frontends == 2)
        load = await stack.load()
        assert load.waiting + load.running == 2
        worker.gate.set()
        for frontend in (frontends[0], frontends[2]):
            await frontend.read_until_finished(1)
            assert frontend.tokens[1] == completion([1, 2, 3], 5)


@pytest.mark.parametrize(("prefill", "beside_decodes"), [("auto", 6), (2, 2)])
async def test_steps_are_as_large_as_the_workers_say(
    tmp_path: Path, prefill: object, beside_decodes: int
) -> None:
    """The smallest of the ranks' limits applies; prompts beside decodes get half of a step."""
    workers = [FakeWorker(rank=rank, world_size=2) for rank in range(2)]
    workers[0].info.max_num_batched_tokens = 20
    workers[1].info.max_num_batched_tokens = 12
    limits = {"max_num_batched_tokens": "auto", "max_num_prefill_tokens": prefill}
    async with stack_of(tmp_path, *workers, **limits) as stack:
        frontend = await stack.frontend()
        assert frontend.info.max_num_batched_tokens == 12
        await frontend.submit(1, list(range(30)), max_tokens=20)
        while not frontend.tokens.get(1):
            await frontend.read()
        for worker in workers:
            worker.gate.clear()
        await frontend.submit(2, list(range(30, 60)), max_tokens=1)
        await stack.until(lambda load: load.running + load.waiting == 2)
        for worker in workers:
            worker.gate.set()
        await frontend.read_until_finished(1, 2)
    lens = [np.frombuffer(step.query_lens, "<i4").tolist() for step in workers[0].steps]
    assert [12] in lens
    assert max(sum(each) - 1 for each in lens if len(each) == 2) == beside_decodes


async def test_a_frontend_that_does_not_read_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler_svc.rpc.connection._MAX_UNREAD", 1000)
    sampling = scheduler_pb2.TokenSampling(max_tokens=400, logprobs=20)
    limits = {"max_num_seqs": 32, "max_num_batched_tokens": 64}
    worker = FakeWorker(num_blocks=32 * 110, max_model_len=1000)
    window_stays_small = [("grpc.http2.bdp_probe", 0)]  # 64 KB
    async with (
        stack_of(tmp_path, worker, **limits) as stack,
        aio.insecure_channel(stack.address, options=window_stays_small) as channel,
    ):
        stuck, other = Frontend(SchedulerServiceStub(channel)), await stack.frontend()
        await stuck.connect()
        await other.submit(1, [5, 6], max_tokens=60)
        for request in range(31):
            await stuck.submit(request, [5, 6, request + 7], sampling=sampling)
        await stack.until(lambda load: load.frontends == 1)
        await other.read_until_finished(1)
        assert other.tokens[1] == completion([5, 6], 60)
        await stack.until(lambda load: load.running == load.blocks_used == 0)
        assert (await stack.load()).sampled_tokens < 31 * 400

        # When it reads on, it finds tokens in order, then a status that tells it to reconnect.
        with pytest.raises(aio.AioRpcError) as caught:
            await stuck.read_until_finished(*range(31))
        assert caught.value.code() is grpc.StatusCode.ABORTED
        assert "more than 1000 outputs were not read" in str(caught.value.details())
        again = await stack.frontend()
        await again.submit(0, [5, 6, 7], generated_ids=np.array(stuck.tokens[0], "<i4").tobytes())


async def test_a_failed_step_is_computed_again_in_a_new_epoch(tmp_path: Path) -> None:
    worker = FakeWorker()
    worker.fail_steps = {4}
    async with stack_of(tmp_path, worker) as stack:
        frontend = await stack.frontend()
        for request in (1, 2):
            await frontend.submit(request, [request] * 6, 10)
        await frontend.read_until_finished(1, 2)
        for request in (1, 2):
            assert frontend.tokens[request] == completion([request] * 6, 10)
    assert {step.epoch for step in worker.steps} == {1, 2}


async def test_a_restarted_worker_is_found_again(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/w.sock"
    worker = FakeWorker()
    server, _ = await start_worker(worker, address)
    async with running(settings_for(tmp_path, [address])) as stack:
        frontend = await stack.frontend()
        worker.gate.clear()
        await frontend.submit(1, [1, 2], 9)
        await worker.step_arrived.wait()
        await server.stop(None)
        server, _ = await start_worker(FakeWorker(), address)
        await frontend.read_until_finished(1)
        assert frontend.tokens[1] == completion([1, 2], 9)
    await server.stop(None)


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


async def test_a_request_that_turns_poisonous_keeps_the_tokens_before(tmp_path: Path) -> None:
    worker = FakeWorker()
    expected = completion([1, 2, 3], 9)
    worker.fails = lambda step: 10 in np.frombuffer(step.context_lens, "<i4")
    async with stack_of(tmp_path, worker) as stack:
        frontend = await stack.frontend()
        await frontend.submit(1, [1, 2, 3], 9)
        await frontend.submit(2, [5], 3)
        await frontend.read_until_finished(1, 2)
        assert frontend.tokens[1] == expected[:7]
        assert frontend.finished[1].cause == scheduler_pb2.FINISH_CAUSE_INTERNAL
        assert frontend.tokens[2] == completion([5], 3)


async def test_completions_of_a_poisoned_prompt_end_with_it(tmp_path: Path) -> None:
    worker = FakeWorker()
    worker.fails = poisoned_by(77)
    async with stack_of(tmp_path, worker) as stack:
        frontend = await stack.frontend()
        await frontend.submit(1, [77], 3, n=3)
        await frontend.read_until_finished(1, 2, 3)
        causes = {frontend.finished[number].cause for number in (1, 2, 3)}
        assert causes == {scheduler_pb2.FINISH_CAUSE_INTERNAL}
    assert len({step.epoch for step in worker.steps}) <= 4


async def test_one_that_is_aborted_on_trial_holds_up_nobody(tmp_path: Path) -> None:
    worker = FakeWorker()
    worker.fails = poisoned_by(77)
    async with stack_of(tmp_path, worker) as stack:
        frontend = await stack.frontend()
        await frontend.submit(1, [77], 3)
        while not any(step.epoch == 3 for step in worker.steps):
            await worker.step_arrived.wait()
            worker.step_arrived.clear()
        await frontend.abort(1)
        await frontend.submit(2, [1], 3)
        await frontend.read_until_finished(2)
        assert frontend.tokens[2] == completion([1], 3)


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
        await frontend.read_until_finished(1)
        assert frontend.tokens[1] == completion([1], 3)
        while not await stack.serving():
            pass
        assert frontend.states[:1] == [False]
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
        await frontend.read_until_finished(1)
        assert frontend.tokens[1] == completion([1, 2], 9)
    assert {step.epoch for step in ranks[0].steps} >= {1, 2}


class SilentOnceRecovered(FakeWorker):
    """A worker that stops answering once it is configured for epoch 2."""

    async def Configure(
        self, request: worker_pb2.ConfigureRequest, context: object
    ) -> worker_pb2.ConfigureResponse:
        if request.epoch == 2:
            self.num_infos = 0
            self.gate.clear()
            self.answers_info.clear()
        return await super().Configure(request, context)


async def test_a_rank_that_falls_silent_in_its_first_step_is_given_up(tmp_path: Path) -> None:
    """That is the step that proves a recovery."""
    worker = SilentOnceRecovered()
    worker.fails = lambda step: step.epoch == 1
    async with stack_of(tmp_path, worker, hang_timeout_s=1) as stack:
        frontend = await stack.frontend()
        await frontend.submit(1, [1, 2], 9)
        while worker.num_infos < 2 or worker.gate.is_set():  # asked in vain, then again
            await stack.load()
        worker.gate.set()
        worker.answers_info.set()
        await frontend.read_until_finished(1)
        assert frontend.tokens[1] == completion([1, 2], 9)
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
        await frontend.read_until_finished(1)
        assert frontend.tokens[1] == completion([1, 2], 9)
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
        await frontend.submit(1, [1, 2], 9)
        await frontend.read_until_finished(1)
        assert frontend.tokens[1] == completion([1, 2], 9)
    await server.stop(None)


WITHDRAW = scheduler_pb2.Trial(withdraw=True)


def alone(*requests: int) -> scheduler_pb2.Trial:
    return scheduler_pb2.Trial(requests=requests, alone=True)


def together(*requests: int) -> scheduler_pb2.Trial:
    return scheduler_pb2.Trial(requests=requests)


async def test_a_suspect_is_tried_alone(tmp_path: Path) -> None:
    async with stack_of(tmp_path, FakeWorker()) as stack:
        owner, other = await stack.frontend(), await stack.frontend()
        await other.submit(1, [1, 2], 100)
        await owner.tell_suspects({7: 2})
        assert await owner.next_trial() == await other.next_trial() == WITHDRAW
        newcomer = asyncio.create_task(stack.frontend())
        await owner.tell_suspects({}, holding=True)
        await other.tell_suspects({}, holding=True)
        assert await owner.next_trial() == alone(7)
        assert await other.next_trial() == alone()
        load = await stack.load()
        assert load.running == load.waiting == 0
        await owner.submit(7, [3, 4], 9, resubmitted=True)
        await owner.read_until_finished(7)
        assert owner.tokens[7] == completion([3, 4], 9)
        assert not newcomer.done()
        await owner.tell_suspects({}, cleared=[7])
        assert await owner.next_trial() == await other.next_trial() == together()
        await newcomer


async def test_a_suspect_that_takes_long_is_not_alone_for_ever(tmp_path: Path) -> None:
    async with stack_of(tmp_path, FakeWorker()) as stack:
        frontend = await stack.frontend()
        await frontend.tell_suspects({7: 0})  # for 2 ** 0 seconds
        assert await frontend.next_trial() == WITHDRAW
        await frontend.tell_suspects({}, holding=True)
        assert await frontend.next_trial() == alone(7)
        assert await frontend.next_trial() == WITHDRAW
        await frontend.tell_suspects({}, cleared=[7], holding=True)
        assert await frontend.next_trial() == together()


async def test_a_frontend_that_does_not_confirm_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler_svc.rpc.trials._CONFIRMATION_S", 2.0)
    async with stack_of(tmp_path, FakeWorker()) as stack:
        owner, hung = await stack.frontend(), await stack.frontend()
        await owner.tell_suspects({7: 2})
        assert await owner.next_trial() == await hung.next_trial() == WITHDRAW
        await owner.tell_suspects({}, holding=True)
        assert await owner.next_trial() == alone(7)
        assert (await hung.failure()).code() is grpc.StatusCode.ABORTED


async def test_many_suspects_are_tried_in_halves_while_the_rest_goes_on(tmp_path: Path) -> None:
    async with stack_of(tmp_path, FakeWorker()) as stack:
        first, second = await stack.frontend(), await stack.frontend()
        await second.tell_suspects({1: 2})
        assert await second.next_trial() == WITHDRAW
        await first.tell_suspects({n: 3 if n < 8 else 2 for n in range(12)}, holding=True)
        await second.tell_suspects({}, cleared=[1], holding=True)
        assert await first.next_trial() == WITHDRAW
        for half in ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [10, 11]):
            while (trial := await first.next_trial()) in (together(), alone()):
                pass
            assert trial == together(*half)
            await second.submit(half[0], [1], 3)
            await second.read_until_finished(half[0])
            for number in half[1:]:
                await first.tell_suspects({}, cleared=[number])
            await first.abort(half[0])


async def test_a_stream_that_is_ended_in_order_says_so(tmp_path: Path) -> None:
    async with stack_of(tmp_path, FakeWorker()) as stack:
        frontend = await stack.frontend()
        os.kill(os.getpid(), signal.SIGTERM)
        assert (await frontend.failure()).code() is grpc.StatusCode.ABORTED


async def test_refusals_name_the_reason(tmp_path: Path) -> None:
    worker = FakeWorker(num_blocks=4)
    async with stack_of(tmp_path, worker, max_waiting=1) as stack:
        frontend = await stack.frontend()
        await frontend.submit(1, [1] * 14, 3)
        await frontend.read_until_finished(1)
        assert frontend.finished[1].cause == scheduler_pb2.FINISH_CAUSE_INVALID
        assert frontend.finished[1].field == "sampling.max_tokens"
        assert "16" in frontend.finished[1].message
        worker.gate.clear()
        await frontend.submit(2, [1] * 14, 2)
        await worker.step_arrived.wait()
        await frontend.submit(3, [1] * 14, 2)
        await frontend.submit(4, [1] * 14, 2)
        await frontend.read_until_finished(4)
        assert frontend.finished[4].cause == scheduler_pb2.FINISH_CAUSE_QUEUE_FULL
        assert frontend.finished[4].retry_after_s > 0
        worker.gate.set()
        await frontend.read_until_finished(2, 3)
        assert frontend.tokens[2] == frontend.tokens[3] == completion([1] * 14, 2)


async def test_a_frontend_with_names_has_the_others_leave_room(tmp_path: Path) -> None:
    worker = FakeWorker()
    worker.gate.clear()
    async with stack_of(tmp_path, worker, max_waiting=8, max_num_seqs=1) as stack:
        names, anonymous = await stack.frontend(), await stack.frontend()
        await names.announce_names()
        await names.submit(0, [1], client=scheduler_pb2.Client(name="first"))
        await worker.step_arrived.wait()  # the announcement has been read
        for number in range(20):
            await anonymous.submit(number, [number], 2)
        await anonymous.read_until_finished(*range(4, 20))
        causes = {finished.cause for finished in anonymous.finished.values()}
        assert causes == {scheduler_pb2.FINISH_CAUSE_QUEUE_FULL}
        await names.submit(1, [2], 2, client=scheduler_pb2.Client(name="second"))
        worker.gate.set()
        await names.read_until_finished(0, 1)
        assert names.tokens[1] == completion([2], 2)
        await anonymous.read_until_finished(*range(4))


async def test_a_deadline_ends_the_request_and_frees_its_blocks(tmp_path: Path) -> None:
    worker = FakeWorker()
    async with stack_of(tmp_path, worker) as stack:
        frontend = await stack.frontend()
        await frontend.submit(1, [1], 100, timeout_s=1e-6)
        await frontend.read_until_finished(1)
        assert frontend.finished[1].cause == scheduler_pb2.FINISH_CAUSE_DEADLINE
        assert (await stack.load()).running == 0


async def test_priorities_are_served_first_and_frontends_in_turn(tmp_path: Path) -> None:
    worker = FakeWorker()
    async with stack_of(tmp_path, worker, max_num_seqs=1) as stack:
        busy, other = await stack.frontend(), await stack.frontend()
        worker.gate.clear()
        await busy.submit(0, [9], 1)
        await worker.step_arrived.wait()
        for number in range(1, 5):
            await busy.submit(number, [number], 1)
        await stack.until(lambda load: load.waiting == 4)
        await other.submit(5, [5], 1)
        await stack.until(lambda load: load.waiting == 5)
        await other.submit(6, [6], 1, priority=-1)
        await stack.until(lambda load: load.waiting == 6)
        worker.gate.set()
        await busy.read_until_finished(1, 2, 3, 4)
        await other.read_until_finished(5, 6)
        first_ids = [np.frombuffer(step.input_ids, "<i4")[0] for step in worker.steps]
        # The tokens of the other one's better priority count, so the busy one goes first.
        assert first_ids == [9, 6, 1, 5, 2, 3, 4]


async def test_the_load_is_visible(tmp_path: Path) -> None:
    async with stack_of(tmp_path, FakeWorker()) as stack:
        frontend = await stack.frontend()
        await frontend.submit(1, [1] * 9, 3)
        await frontend.read_until_finished(1)
        load = await stack.load()
        assert load.frontends == 1
        assert (load.admissions, load.sampled_tokens, load.prompt_tokens) == (1, 3, 9)
        assert load.tokens_per_s > 0
        assert load.step_time_s > 0
        assert load.blocks_used == load.waiting_tokens == 0
        assert load.blocks_free + load.blocks_cached == load.blocks


async def test_a_salt_keeps_prefixes_apart(tmp_path: Path) -> None:
    async with stack_of(tmp_path, FakeWorker()) as stack:
        frontend = await stack.frontend()
        for number, salt in enumerate(["", "a", "b", "a"]):
            await frontend.submit(number, [1] * 9, 3, cache_salt=salt)
            await frontend.read_until_finished(number)
        cached = [frontend.started[number].cached_prompt_tokens for number in range(4)]
        assert cached[:3] == [0, 0, 0]
        assert cached[3] > 0
        assert frontend.tokens[3] == frontend.tokens[0]


async def test_completions_of_one_prompt_have_numbers_and_seeds_of_their_own(
    tmp_path: Path,
) -> None:
    prompt, seed = list(range(10)), 2**64 - 2
    sampling = scheduler_pb2.TokenSampling(max_tokens=6, seed=seed, temperature=1.0)
    async with stack_of(tmp_path, FakeWorker()) as stack:
        frontend = await stack.frontend()
        await frontend.submit(7, prompt, sampling=sampling, n=4)
        await frontend.read_until_finished(7, 8, 9, 10)
        for i in range(4):
            assert frontend.tokens[7 + i] == completion(prompt, 6, (seed + i) % 2**64)
            assert frontend.started[7 + i].cached_prompt_tokens == (9 if i else 0)
        load = await stack.load()
        assert load.step_tokens == 10 + 5 + 3 * 6
        assert load.blocks_free + load.blocks_cached == load.blocks


async def test_log_probabilities_come_with_their_tokens(tmp_path: Path) -> None:
    prompt = list(range(40, 60))  # in two chunks
    sampling = scheduler_pb2.TokenSampling(max_tokens=3, logprobs=2, prompt_logprobs=0)
    async with stack_of(tmp_path, FakeWorker()) as stack:
        frontend = await stack.frontend()
        await frontend.submit(1, prompt, sampling=sampling)
        await frontend.submit(2, prompt, 3)
        await frontend.read_until_finished(1, 2)
        tokens = prompt + completion(prompt, 3)
        before = states(tokens)
        assert frontend.logprobs.keys() == frontend.prompt_logprobs.keys() == {1}
        assert frontend.prompt_logprobs[1] == {
            i: logprobs(before[i - 1], prompt[i], 0) for i in range(1, 20)
        }
        assert frontend.logprobs[1] == {
            i: logprobs(before[19 + i], tokens[20 + i], 2) for i in range(3)
        }


async def test_every_feature_reaches_the_worker(tmp_path: Path) -> None:
    first = completion([1, 2], 1)[0]
    sampling = scheduler_pb2.TokenSampling(
        max_tokens=3,
        top_k=3,
        top_p=0.5,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=2.0,
        bias_ids=np.array([9, 4], "<i4").tobytes(),
        bias_values=np.array([1.0, -100.0], "<f4").tobytes(),
        min_tokens=2,
        eos_token_ids=[first],
    )
    worker = FakeWorker()
    async with stack_of(tmp_path, worker) as stack:
        frontend = await stack.frontend()
        await frontend.submit(1, [1, 2], sampling=sampling)
        await frontend.read_until_finished(1)
        assert frontend.tokens[1] == completion([1, 2], 3, min_tokens=2, ends=[first])
    features = worker.steps[0].features
    columns = (features.top_p, features.min_p, features.repetition_penalties)
    assert [np.frombuffer(c, "<f4").tolist() for c in columns] == [[0.5], [0.25], [1.5]]
    columns = (features.presence_penalties, features.frequency_penalties, features.bias_values)
    assert [np.frombuffer(c, "<f4").tolist() for c in columns] == [
        [-1.0],
        [2.0],
        [1.0, -100.0, -np.inf],
    ]
    assert np.frombuffer(features.bias_ids, "<i4").tolist() == [9, 4, first]


@pytest.mark.parametrize(
    ("fields", "n", "word"),
    [
        ({"top_p": float("nan")}, 1, "sampling.top_p: nan; must be in (0, 1]"),
        ({}, 65, "sampling.n: 65"),
    ],
)
async def test_values_that_no_worker_could_run_are_refused(
    tmp_path: Path, fields: dict[str, Any], n: int, word: str
) -> None:
    async with stack_of(tmp_path, FakeWorker()) as stack:
        frontend = await stack.frontend()
        sampling = scheduler_pb2.TokenSampling(max_tokens=3, **fields)
        await frontend.submit(1, [1], sampling=sampling, n=n)
        await frontend.submit(2, [1], 3)
        await frontend.read_until_finished(1, 2)
        assert frontend.finished[1].cause == scheduler_pb2.FINISH_CAUSE_INVALID
        assert word in f"{frontend.finished[1].field}: {frontend.finished[1].message}"
        assert frontend.tokens[2] == completion([1], 3)


async def test_malformed_messages_end_the_stream_and_nothing_else(tmp_path: Path) -> None:
    async with stack_of(tmp_path, FakeWorker()) as stack:
        other = await stack.frontend()
        bad = await stack.frontend()
        await bad._call.write(
            scheduler_pb2.FrontendMessage(submit=scheduler_pb2.Submit(prompt_ids=b"abc"))
        )
        error = await bad.failure()
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "submit.prompt_ids" in (error.details() or "")
        garbage = stack.channel.stream_stream("/nanovllm.scheduler.v1.SchedulerService/Connect")()
        assert await garbage.read()
        await garbage.write(b"\xff\xff\xff")
        with pytest.raises(aio.AioRpcError) as raised:
            await garbage.read()
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await other.submit(1, [1], 3)
        await other.read_until_finished(1)
        assert other.tokens[1] == completion([1], 3)


@pytest.mark.parametrize(
    ("ranks", "word"),
    [
        ([(0, 2), (0, 2)], "rank 1 of 2 expected"),
        ([(0, 1), (1, 1)], "rank 0 of 2 expected"),
    ],
)
async def test_ranks_that_contradict_each_other_stop_the_service(
    tmp_path: Path, ranks: list[tuple[int, int]], word: str
) -> None:
    workers = [FakeWorker(rank=rank, world_size=size) for rank, size in ranks]
    with pytest.raises(WorkerMismatchError, match=word):
        await _serve_with(tmp_path, workers)


async def test_ranks_with_other_weights_stop_the_service(tmp_path: Path) -> None:
    workers = [FakeWorker(rank=r, world_size=2, fingerprint=f"f{r}") for r in range(2)]
    with pytest.raises(WorkerMismatchError, match="model_fingerprint: f0 on rank 0, f1 on rank 1"):
        await _serve_with(tmp_path, workers)


async def _serve_with(tmp_path: Path, workers: list[FakeWorker]) -> None:
    started = [await start_worker(worker) for worker in workers]
    link = HostLink.create()
    try:
        await serve(settings_for(tmp_path, [address for _, address in started]), link=link)
    finally:
        link.close()
        for server, _ in started:
            await server.stop(None)


async def test_health_is_serving_only_with_workers(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/w.sock"
    async with running(settings_for(tmp_path, [address])) as stack:
        health = health_pb2_grpc.HealthStub(stack.channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
        status = await watch.read()
        assert status.status == health_pb2.HealthCheckResponse.NOT_SERVING
        server, _ = await start_worker(FakeWorker(), address)
        status = await watch.read()
        assert status.status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
    await server.stop(None)


async def _ends(stack: Stack, *submits: tuple[int, dict[str, Any]]) -> dict[int, tuple[int, str]]:
    """Submits requests from one frontend while another goes on; returns each end's cause and
    field and message."""
    other, frontend = await stack.frontend(), await stack.frontend()
    await other.submit(1, [4, 5], 60)
    for request, fields in submits:
        sampling = scheduler_pb2.TokenSampling(**{"max_tokens": 4, **fields.pop("sampling", {})})
        await frontend.submit(request, [1, 2], sampling=sampling, **fields)
    await frontend.read_until_finished(*(request for request, _ in submits))
    await other.read_until_finished(1)
    assert other.tokens[1] == completion([4, 5], 60)
    frontend.close()
    await stack.until(lambda load: load.frontends == 1 and not load.blocks_used)
    ends = frontend.finished.items()
    return {n: (end.cause, f"{end.field}: {end.message}") for n, end in ends}


@pytest.mark.parametrize(
    ("request_number", "fields", "message"),
    [
        (2, {"timeout_s": float("nan")}, "timeout_s: must be a number"),
        (2, {"sampling": {"grammar": {"kind": 9}}}, "sampling.grammar: kind 9 is unknown"),
        (2, {"sampling": {"beam_width": 2, "grammar": {"kind": 2}}}, "sampling.beam_width: 2; mus"),
        (
            2,
            {"sampling": {"beam_width": 2}, "generated_ids": bytes(4)},
            "sampling.beam_width: 2; must be 0 when tokens are resumed",
        ),
        (
            2,
            {"sampling": {"beam_width": 2, "length_penalty": 1e38, "max_tokens": 3}},
            "sampling.length_penalty: 9.99",
        ),
        (
            2**64 - 1,
            {"sampling": {"beam_width": 2}},
            f"request: {2**64 - 1} leaves no numbers for 2 completions",
        ),
    ],
)
async def test_what_no_frontend_sends_is_refused(
    tmp_path: Path, request_number: int, fields: dict[str, Any], message: str
) -> None:
    async with stack_of(tmp_path, FakeWorker()) as stack:
        cause, found = (await _ends(stack, (request_number, fields)))[request_number]
    assert cause == scheduler_pb2.FINISH_CAUSE_INVALID
    assert found.startswith(message)


async def test_the_numbers_of_beams_to_come_are_taken(tmp_path: Path) -> None:
    async with stack_of(tmp_path, FakeWorker()) as stack:
        ten, nine = ({"sampling": {"beam_width": 3}} for _ in range(2))
        ends = await _ends(stack, (10, ten), (9, nine), (13, {}))
        assert ends[9] == (scheduler_pb2.FINISH_CAUSE_INVALID, "request: its number is in use")
        assert {ends[n][0] for n in (10, 11, 12, 13)} == {scheduler_pb2.FINISH_CAUSE_LENGTH}
