"""The public service, end to end over gRPC."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from frontend.api.servicer import SERVICE_NAME
from frontend.engines.token_stream import TokenStream
from frontend.generation import Generation
from nano_vllm_grpc.pb import frontend_pb2 as pb
from nano_vllm_grpc.pb.frontend_pb2_grpc import InferenceServiceStub
from shared.sampling_params import NUMBERS
from tests.frontend.conftest import Service, detail, failure
from tests.frontend.fake_scheduler import CACHED_PROMPT_TOKENS, INFO, QUEUE_S, FakeScheduler
from tests.frontend.test_generation import request as token_request

TEXT = "Once upon a time, 你好 👍🏽!"
GENERATE = f"/{SERVICE_NAME}/Generate"


@dataclass
class UnreadCall:
    """A stream of long chunks that nobody reads: after a few hundred, writes block."""

    service: Service
    stub: Any  # of the call's own connection
    call: Any
    number: int

    async def step(self, steps: int) -> None:
        for _ in range(steps):
            self.service.scheduler.step()
        await self.service.scheduler.connection.outbox.join()


@pytest.fixture
async def unread(scheduler: FakeScheduler, service: Service) -> AsyncIterator[UnreadCall]:
    scheduler.info.max_model_len = 10_000
    await service.reconnect()
    scheduler.automatic = False
    message = request(max_tokens=2_000)
    message.request_id = 256 * "x"
    window_stays_small = [("grpc.http2.bdp_probe", 0)]  # 64 KB
    async with aio.insecure_channel(service.address, options=window_stays_small) as channel:
        stub: Any = InferenceServiceStub(channel)
        call = stub.GenerateStream(message)
        yield UnreadCall(service, stub, call, (await scheduler.submits.get()).request)


def request(text: str = TEXT, **sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, sampling=pb.SamplingParams(**sampling))


def _count(*kinds: type) -> int:
    return sum(type(each) in kinds for each in gc.get_objects())


def joined(responses: list[pb.GenerateStreamResponse]) -> tuple[str, list[int]]:
    return "".join(r.text for r in responses), [t for r in responses for t in r.token_ids]


@pytest.mark.parametrize("kind", ["text", "token_ids", "chat"])
async def test_every_kind_of_prompt_is_answered(service: Service, hf: Any, kind: str) -> None:
    ids = hf(TEXT).input_ids
    if kind == "text":
        message = request(max_tokens=30)
    elif kind == "token_ids":
        message = token_request(ids, max_tokens=30)
    else:
        messages = [{"role": "user", "content": TEXT}]
        ids = hf.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        chat = pb.Chat(messages=[pb.ChatMessage(**m) for m in messages])
        sampling = pb.SamplingParams(max_tokens=30, ignore_eos=True)
        message = pb.GenerateRequest(chat=chat, sampling=sampling)
    response = await service.stub.Generate(message)
    (completion,) = response.completions
    expected = [ids[i % len(ids)] for i in range(30)]
    assert list(completion.token_ids) == expected
    assert completion.text == hf.decode(expected, skip_special_tokens=True)
    assert completion.finish_reason == pb.FINISH_REASON_LENGTH
    assert response.usage == pb.Usage(
        prompt_tokens=len(ids), cached_prompt_tokens=CACHED_PROMPT_TOKENS, completion_tokens=30
    )
    assert response.timings.queue_s == QUEUE_S
    assert 0 < response.timings.first_token_s <= response.timings.total_s
    assert service.scheduler.submits.get_nowait().timeout_s == 0  # the client gave no deadline


async def test_without_max_tokens_a_completion_is_as_long_as_fits(service: Service) -> None:
    usage = (await service.stub.Generate(request())).usage
    assert usage.prompt_tokens + usage.completion_tokens == INFO.max_model_len


async def test_request_id_is_echoed_or_made(service: Service) -> None:
    message = request(max_tokens=2)
    made = (await service.stub.Generate(message)).request_id
    assert made
    assert made != (await service.stub.Generate(message)).request_id
    message.request_id = "mine"
    assert (await service.stub.Generate(message)).request_id == "mine"
    assert {r.request_id for r in await service.collect(message)} == {"mine"}


EOS, STOP, LENGTH = pb.FINISH_REASON_EOS, pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH
SHOWN, SPECIAL = {"include_stop_in_output": True}, {"skip_special_tokens": False}


@pytest.mark.parametrize(
    ("sampling", "text", "reason"),
    [
        ({}, "hi", EOS),
        (SPECIAL, "hi", EOS),
        (SHOWN, "hi", EOS),
        ({**SHOWN, **SPECIAL}, "hi<|im_end|>", EOS),
        ({"stop": ["i"], **SHOWN}, "hi", STOP),
        ({"stop": ["i"], "min_tokens": 2}, "hi", EOS),
        ({"ignore_eos": True, **SPECIAL, "max_tokens": 5}, "hi<|im_end|>th", LENGTH),
        ({"ignore_eos": True, "max_tokens": 5}, "hith", LENGTH),
        ({"stop_token_ids": [72]}, "h", STOP),
    ],
)
async def test_text_at_the_end_and_of_special_tokens(
    service: Service, hf: Any, sampling: dict[str, Any], text: str, reason: int
) -> None:
    tokens = ["h", "i", "<|im_end|>", "t", "h"]
    ids = [hf.convert_tokens_to_ids(token) for token in tokens]
    message = token_request(ids, **sampling)
    response = await service.stub.Generate(message)
    (completion,) = response.completions
    assert (completion.text, completion.finish_reason) == (text, reason)
    stop_reason = "i" if "stop" in sampling else str(ids[1])
    assert completion.stop_reason == (stop_reason if reason == STOP else "")
    assert list(completion.token_ids) == [ids[i % 5] for i in range(len(completion.token_ids))]
    assert joined(await service.collect(message)) == (text, list(completion.token_ids))
    # Also if a stop string ends the completion, the engine's report is kept.
    assert response.usage.cached_prompt_tokens == CACHED_PROMPT_TOKENS


async def test_tokens_that_arrive_during_a_write_join_the_next_chunk(unread: UnreadCall) -> None:
    await unread.step(2_000)
    responses = []
    while not responses or not responses[-1].finish_reason:
        responses.append(await unread.call.read())
    assert len(joined(responses)[1]) == 2_000
    counts = itertools.accumulate((len(r.token_ids) for r in responses), initial=0)
    assert [r.token_offset for r in responses] == [*counts][:-1]
    assert len(responses) < 2_000


async def test_requests_of_a_client_that_vanishes_are_aborted(service: Service) -> None:
    service.scheduler.automatic = False
    channel = aio.insecure_channel(service.address)
    call = InferenceServiceStub(channel).GenerateStream(request())
    submit = await service.scheduler.submits.get()
    service.scheduler.step()
    await call.read()
    await channel.close()
    assert await service.scheduler.aborts.get() == submit.request


async def test_clients_that_cancel_all_at_once_leave_nothing_behind(service: Service) -> None:
    service.scheduler.automatic = False

    async def open_and_cancel(count: int) -> None:
        calls = [service.stub.GenerateStream(request(max_tokens=100)) for _ in range(count)]
        handles = {(await service.scheduler.submits.get()).request for _ in calls}
        service.scheduler.step()
        for call in calls:
            call.cancel()
        assert {await service.scheduler.aborts.get() for _ in calls} == handles

    def left() -> int:
        gc.collect()
        return len(asyncio.all_tasks()) + _count(TokenStream, Generation)

    await open_and_cancel(1)
    before = left()
    await open_and_cancel(128)  # as many as a connection has
    async with asyncio.timeout(60):
        while left() > before:
            await service.stub.GetModel(pb.GetModelRequest())


async def test_a_client_that_does_not_read_slows_no_other_call(unread: UnreadCall) -> None:
    """Not even on its own connection. It is released when it leaves, although a write waits."""
    await unread.step(1_900)
    scheduler = unread.service.scheduler
    other = unread.stub.GenerateStream(request(max_tokens=20))
    await scheduler.submits.get()
    for _ in range(20):
        scheduler.step()
    assert len(joined([response async for response in other])[1]) == 20
    unread.call.cancel()
    assert await scheduler.aborts.get() == unread.number


async def test_a_deadline_reaches_the_scheduler_and_ends_the_call(service: Service) -> None:
    service.scheduler.automatic = False
    timeout_s = 0.15
    while service.scheduler.submits.empty():  # until one has been in time
        timeout_s *= 2
        call = service.stub.Generate(request(), timeout=timeout_s)
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    submit = service.scheduler.submits.get_nowait()
    assert 0 < submit.timeout_s <= timeout_s + 0.002  # gRPC rounds to milliseconds, upwards
    assert await service.scheduler.aborts.get() == submit.request


async def test_without_tokens_any_priority_and_salt_may_be_used(service: Service) -> None:
    message = request(max_tokens=4)
    message.priority, message.cache_salt = -(2**31), "mine"
    await service.stub.Generate(message)
    submit = await service.scheduler.submits.get()
    assert not submit.HasField("client")
    assert (submit.priority, submit.cache_salt) == (-(2**31), ":mine")


async def test_tokenize_and_detokenize(service: Service, hf: Any) -> None:
    reply = await service.stub.Tokenize(pb.TokenizeRequest(text=TEXT))
    assert list(reply.token_ids) == hf(TEXT).input_ids
    back = await service.stub.Detokenize(pb.DetokenizeRequest(token_ids=reply.token_ids))
    assert back.text == TEXT
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    reply = await service.stub.Tokenize(pb.TokenizeRequest(chat=chat))
    assert list(reply.token_ids) == hf.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=False
    )
    assert list((await service.stub.Tokenize(pb.TokenizeRequest(text=""))).token_ids) == []


async def test_get_model(service: Service) -> None:
    model = await service.stub.GetModel(pb.GetModelRequest())
    assert model.model == "demo"
    assert model.max_model_len == INFO.max_model_len
    assert model.vocab_size == INFO.vocab_size
    assert list(model.eos_token_ids) == [1535, 1533]
    defaults = {field.name: value for field, value in model.default_sampling.ListFields()}
    assert defaults.keys() == {name for name, each in NUMBERS.items() if each.from_model}
    assert defaults == {name: NUMBERS[name].default for name in defaults} | {
        "temperature": pytest.approx(0.6)
    }
    assert model.capacity == pb.EngineCapacity(
        num_blocks=64,
        block_size=16,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        max_waiting=32,
        tensor_parallel_size=1,
    )


async def test_health_and_errors_follow_the_scheduler(service: Service) -> None:
    health = health_pb2_grpc.HealthStub(service.channel)
    for name in ("", SERVICE_NAME):
        reply = await health.Check(health_pb2.HealthCheckRequest(service=name))
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    await service.scheduler.stop()
    await service.wait_for_health(False)
    error = await failure(service.stub.GetModel(pb.GetModelRequest()))
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    retry = detail(error, error_details_pb2.RetryInfo)
    assert 0 < retry.retry_delay.ToTimedelta().total_seconds() <= 1
    await service.scheduler.start()
    await service.wait_for_health(True)
    await service.stub.Generate(request(max_tokens=1))


BAD_MESSAGES: list[tuple[bytes | pb.GenerateRequest, str]] = [
    (pb.GenerateRequest(request_id="x" * 257), "request_id: must be printable"),
    (pb.GenerateRequest(request_id="a\nb"), "request_id: must be printable"),
    (pb.GenerateRequest(cache_salt="x" * 257), "cache_salt: 257 characters"),
    (pb.GenerateRequest(engine="x" * 257), "engine: 257 characters"),
    (b"", "prompt: missing"),
    (b"\x12\x00", "text: empty"),
    (token_request([]), "token_ids: empty"),
    (token_request([1, 2], resume=[1] * 127), "resume_token_ids: 127 tokens; the limit is 126"),
    (b"\x22\x82\x80\x02" + b"\x0a\x00" * 16_385, "chat: 16385 messages, tools and tool calls;"),
    (b"\x22\x86\x80\x02\x0a\x82\x80\x02" + b"\x1a\x00" * 16_385, "chat: 16386 messages"),
    (token_request([1, 1536]), "token_ids[1]: 1536"),
    (request("word " * 200), "text: "),
    (request("x" * 500_000), "text: 500000 bytes"),
    (token_request([1] * 128), "token_ids: 128 tokens; the limit is 127"),
    (request(max_tokens=127), "sampling.max_tokens: 127; this prompt"),
    (b"\xff\xfe\xfd garbage", "message: not a readable message"),
    (b"\x12\x02\xc3\x28", "message: not a readable message"),
    (request(top_p=1.5), "sampling.top_p: 1.5 is out of range"),
]


BAD_TOKENIZER_MESSAGES = [
    ("Tokenize", pb.TokenizeRequest(), "prompt: missing"),
    ("Tokenize", pb.TokenizeRequest(chat=pb.Chat()), "chat.messages: empty"),
    ("Detokenize", pb.DetokenizeRequest(token_ids=[1536]), "token_ids[0]: 1536"),
]


async def test_bad_messages_are_rejected_and_do_no_harm(service: Service) -> None:
    async def rejected(call: Any, reason: str) -> None:
        error = await failure(call)
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT, reason
        assert (error.details() or "").startswith(reason)
        bad_request = detail(error, error_details_pb2.BadRequest)
        assert reason.startswith(bad_request.field_violations[0].field)

    raw = service.channel.unary_unary(GENERATE)
    raw_stream = service.channel.unary_stream(GENERATE + "Stream")
    for message, reason in BAD_MESSAGES:
        data = message if isinstance(message, bytes) else message.SerializeToString()
        await rejected(raw(data), reason)
        await rejected(raw_stream(data).read(), reason)
    for method, argument, reason in BAD_TOKENIZER_MESSAGES:
        await rejected(getattr(service.stub, method)(argument), reason)
    assert service.scheduler.submits.empty()
    await service.stub.Generate(token_request([1] * (INFO.max_model_len - 1)))
