"""The public service, end to end over gRPC."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
import structlog
from google.rpc import error_details_pb2, status_pb2
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from frontend.api.servicer import SERVICE_NAME
from frontend.engines.token_stream import TokenStream
from frontend.generation import Generation
from nano_vllm_grpc.pb import frontend_pb2 as pb
from nano_vllm_grpc.pb.frontend_pb2_grpc import InferenceServiceStub
from shared.pb import scheduler_pb2
from shared.sampling_params import NUMBERS
from tests.frontend.conftest import Service
from tests.frontend.fake_scheduler import CACHED_PROMPT_TOKENS, INFO, FakeScheduler

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
    messages = [{"role": "user", "content": TEXT}]
    ids = {
        "text": hf(TEXT).input_ids,
        "token_ids": hf(TEXT).input_ids,
        "chat": hf.apply_chat_template(messages, add_generation_prompt=True, return_dict=False),
    }[kind]
    message = {
        "text": request(max_tokens=30),
        "token_ids": pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=ids), sampling=pb.SamplingParams(max_tokens=30)
        ),
        "chat": pb.GenerateRequest(
            chat=pb.Chat(messages=[pb.ChatMessage(**m) for m in messages]),
            sampling=pb.SamplingParams(max_tokens=30, ignore_eos=True),
        ),
    }[kind]
    response = await service.stub.Generate(message)
    (completion,) = response.completions
    expected = [ids[i % len(ids)] for i in range(30)]
    assert list(completion.token_ids) == expected
    assert completion.text == hf.decode(expected, skip_special_tokens=True)
    assert completion.finish_reason == pb.FINISH_REASON_LENGTH
    assert response.usage == pb.Usage(
        prompt_tokens=len(ids), cached_prompt_tokens=3, completion_tokens=30
    )
    assert response.timings.queue_s == 0.25
    assert 0 < response.timings.first_token_s <= response.timings.total_s
    assert service.scheduler.submits.get_nowait().timeout_s == 0  # the client gave no deadline


@pytest.mark.parametrize(
    "sampling",
    [
        {"max_tokens": 40},
        {},
        {"stop": ["你好"]},
        {"stop": ["time, 你", "!Once up"]},
        {"stop": ["never there"], "max_tokens": 7},
        {"stop_token_ids": [5], "seed": 3},
    ],
)
async def test_the_stream_joined_is_what_generate_returns(
    service: Service, sampling: dict[str, Any]
) -> None:
    whole = (await service.stub.Generate(request(**sampling))).completions[0]
    # Steps one by one, for as many chunks as possible.
    service.scheduler.automatic = False
    call = service.stub.GenerateStream(request(**sampling))
    while not service.scheduler.submits.empty():
        service.scheduler.submits.get_nowait()
    await service.scheduler.submits.get()
    responses = []
    while service.scheduler.connection.live:
        service.scheduler.step()
        response = await call.read()
        responses.append(response)
        if response.finish_reason:
            break
    assert await call.read() is aio.EOF
    assert len(responses) == len(whole.token_ids)
    assert joined(responses) == (whole.text, list(whole.token_ids))
    assert [r.token_offset for r in responses] == list(range(len(responses)))
    assert {r.finish_reason for r in responses[:-1]} <= {pb.FINISH_REASON_UNSPECIFIED}
    assert responses[-1].finish_reason == whole.finish_reason
    assert responses[-1].stop_reason == whole.stop_reason
    assert responses[-1].usage.completion_tokens == len(whole.token_ids)
    assert responses[-1].timings.total_s > 0
    assert not any(r.HasField("usage") or r.HasField("timings") for r in responses[:-1])


async def test_max_tokens_is_by_default_what_fits_the_model(service: Service, hf: Any) -> None:
    response = await service.stub.Generate(request())
    assert response.usage.completion_tokens == INFO.max_model_len - len(hf(TEXT).input_ids)


async def test_request_id_is_echoed_or_made(service: Service) -> None:
    message = request(max_tokens=2)
    made = (await service.stub.Generate(message)).request_id
    assert made
    assert made != (await service.stub.Generate(message)).request_id
    message.request_id = "mine"
    assert (await service.stub.Generate(message)).request_id == "mine"
    assert {r.request_id for r in await service.collect(message)} == {"mine"}


async def test_stop_string_that_spans_tokens_ends_the_completion(service: Service, hf: Any) -> None:
    service.scheduler.automatic = False
    call = asyncio.ensure_future(service.stub.Generate(request(stop=["upon a t"])))
    submit = await service.scheduler.submits.get()
    assert not submit.sampling.stop_token_ids
    while service.scheduler.aborts.empty():
        service.scheduler.step()
        await asyncio.sleep(0)
    assert service.scheduler.aborts.get_nowait() == submit.request
    (completion,) = (await call).completions
    assert completion.text == "Once "
    assert completion.finish_reason == pb.FINISH_REASON_STOP
    assert completion.stop_reason == "upon a t"
    kept = hf.decode(completion.token_ids)
    assert "upon a t" in kept
    assert "upon a t" not in hf.decode(completion.token_ids[:-1])


async def test_stop_token_is_kept_without_its_text(service: Service, hf: Any) -> None:
    ids = hf(TEXT).input_ids
    (completion,) = (await service.stub.Generate(request(stop_token_ids=[ids[2]]))).completions
    assert list(completion.token_ids) == ids[:3]
    assert completion.text == hf.decode(ids[:2])
    assert completion.finish_reason == pb.FINISH_REASON_STOP
    assert completion.stop_reason == str(ids[2])


async def test_end_of_sequence_is_kept_without_text_and_may_be_ignored(
    service: Service, hf: Any
) -> None:
    message = request("hi<|im_end|>there", max_tokens=20)
    ids = hf("hi<|im_end|>there").input_ids
    end = ids.index(hf.convert_tokens_to_ids("<|im_end|>"))
    (completion,) = (await service.stub.Generate(message)).completions
    assert list(completion.token_ids) == ids[: end + 1]
    assert completion.text == "hi"
    assert completion.finish_reason == pb.FINISH_REASON_EOS
    assert completion.stop_reason == ""
    message.sampling.ignore_eos = True
    (completion,) = (await service.stub.Generate(message)).completions
    assert len(completion.token_ids) == 20
    assert completion.finish_reason == pb.FINISH_REASON_LENGTH


@pytest.mark.parametrize(
    ("sampling", "text", "reason"),
    [
        ({}, "hi", pb.FINISH_REASON_EOS),
        ({"skip_special_tokens": False}, "hi", pb.FINISH_REASON_EOS),
        ({"include_stop_in_output": True}, "hi", pb.FINISH_REASON_EOS),
        (
            {"include_stop_in_output": True, "skip_special_tokens": False},
            "hi<|im_end|>",
            pb.FINISH_REASON_EOS,
        ),
        ({"stop": ["i"], "include_stop_in_output": True}, "hi", pb.FINISH_REASON_STOP),
        ({"stop": ["i"], "min_tokens": 2}, "hi", pb.FINISH_REASON_EOS),
        (
            {"ignore_eos": True, "skip_special_tokens": False, "max_tokens": 5},
            "hi<|im_end|>th",
            pb.FINISH_REASON_LENGTH,
        ),
        ({"ignore_eos": True, "max_tokens": 5}, "hith", pb.FINISH_REASON_LENGTH),
    ],
)
async def test_what_of_the_end_and_of_special_tokens_is_shown(
    service: Service, hf: Any, sampling: dict[str, Any], text: str, reason: int
) -> None:
    tokens = ["h", "i", "<|im_end|>", "t", "h"]
    ids = [hf.convert_tokens_to_ids(token) for token in tokens]
    message = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=ids), sampling=pb.SamplingParams(**sampling)
    )
    (completion,) = (await service.stub.Generate(message)).completions
    assert (completion.text, completion.finish_reason) == (text, reason)
    assert joined(await service.collect(message)) == (text, list(completion.token_ids))


async def test_half_a_character_is_never_sent(service: Service, hf: Any) -> None:
    ids = hf("👍").input_ids
    assert len(ids) > 1
    responses = await service.collect(request("👍", max_tokens=3 * len(ids) - 1))
    assert "\ufffd" not in "".join(r.text for r in responses[:-1])
    assert joined(responses)[0] == "👍👍\ufffd"


async def test_tokens_that_come_during_a_write_join_the_next_chunk(unread: UnreadCall) -> None:
    await unread.step(2_000)
    responses = []
    while not responses or not responses[-1].finish_reason:
        responses.append(await unread.call.read())
    assert len(joined(responses)[1]) == 2_000
    assert [r.token_offset for r in responses] == _offsets(responses)
    assert len(responses) < 2_000


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_cancelling_aborts_in_the_scheduler(service: Service, method: str) -> None:
    service.scheduler.automatic = False
    call = getattr(service.stub, method)(request())
    submit = await service.scheduler.submits.get()
    service.scheduler.step()
    call.cancel()
    assert await service.scheduler.aborts.get() == submit.request


async def test_a_client_that_vanishes_frees_its_requests(service: Service) -> None:
    service.scheduler.automatic = False
    channel = aio.insecure_channel(service.address)
    call = InferenceServiceStub(channel).GenerateStream(request())
    submit = await service.scheduler.submits.get()
    service.scheduler.step()
    await call.read()
    await channel.close()
    assert await service.scheduler.aborts.get() == submit.request


async def test_a_client_that_does_not_read_is_freed_when_it_goes(unread: UnreadCall) -> None:
    """The call ends while a chunk is being written, not while waiting for tokens."""
    await unread.step(1_900)
    unread.call.cancel()
    assert await unread.service.scheduler.aborts.get() == unread.number


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
    await open_and_cancel(1000)
    async with asyncio.timeout(60):
        while left() > before:
            await service.stub.GetModel(pb.GetModelRequest())


async def test_a_client_that_does_not_read_slows_nobody(unread: UnreadCall) -> None:
    """It slows nobody even on its own connection."""
    await unread.step(1_900)
    scheduler = unread.service.scheduler
    other = unread.stub.GenerateStream(request(max_tokens=20))
    await scheduler.submits.get()
    for _ in range(20):
        scheduler.step()
    assert len(joined([response async for response in other])[1]) == 20


async def test_without_an_engine_clients_are_told_to_come_back(service: Service) -> None:
    await service.scheduler.stop()
    await service.wait_for_health(False)
    for call in (service.stub.Generate, service.stub.GetModel):
        with pytest.raises(aio.AioRpcError) as caught:
            await call(request() if call == service.stub.Generate else pb.GetModelRequest())
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        retry = _detail(caught.value, error_details_pb2.RetryInfo)
        assert 0 < retry.retry_delay.ToTimedelta().total_seconds() <= 1


async def test_a_deadline_reaches_the_scheduler_and_ends_the_call(service: Service) -> None:
    service.scheduler.automatic = False
    call = service.stub.Generate(request(), timeout=0.3)
    waiting = asyncio.ensure_future(_result(call))
    submit = await service.scheduler.submits.get()
    assert 0 < submit.timeout_s <= 0.3
    with pytest.raises(aio.AioRpcError) as caught:
        await waiting
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert await service.scheduler.aborts.get() == submit.request


async def test_queue_full_says_when_to_retry(service: Service) -> None:
    service.scheduler.refusal = scheduler_pb2.Finished(
        cause=scheduler_pb2.FINISH_CAUSE_QUEUE_FULL, message="32 are waiting", retry_after_s=1.5
    )
    with pytest.raises(aio.AioRpcError) as caught:
        await service.stub.Generate(request())
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert caught.value.details() == "32 are waiting"
    retry = _detail(caught.value, error_details_pb2.RetryInfo)
    assert retry.retry_delay.ToTimedelta().total_seconds() == 1.5


async def test_a_grammar_that_the_scheduler_refuses_is_blamed_on_its_field(
    service: Service,
) -> None:
    field = "sampling.structured_output.regex"
    service.scheduler.refusal = scheduler_pb2.Finished(
        cause=scheduler_pb2.FINISH_CAUSE_INVALID, message="missing ): at 3", field=field
    )
    with pytest.raises(aio.AioRpcError) as caught:
        await service.stub.Generate(request(structured_output=pb.StructuredOutput(regex="(a")))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == f"{field}: missing ): at 3"
    (violation,) = _detail(caught.value, error_details_pb2.BadRequest).field_violations
    assert (violation.field, violation.description) == (field, "missing ): at 3")
    grammar = service.scheduler.submits.get_nowait().sampling.grammar
    assert (grammar.kind, grammar.text) == (scheduler_pb2.GRAMMAR_KIND_REGEX, "(a")


async def test_an_engine_failure_says_nothing_but_that(service: Service) -> None:
    service.scheduler.refusal = scheduler_pb2.Finished(
        cause=scheduler_pb2.FINISH_CAUSE_INTERNAL, message="secret"
    )
    with pytest.raises(aio.AioRpcError) as caught:
        await service.stub.Generate(request())
    assert caught.value.code() == grpc.StatusCode.INTERNAL
    assert caught.value.details() == "internal error"


async def test_a_stream_survives_a_lost_connection(service: Service, hf: Any) -> None:
    scheduler = service.scheduler
    scheduler.automatic = False
    call = service.stub.GenerateStream(request(max_tokens=12))
    await scheduler.submits.get()
    scheduler.step()
    responses = [await call.read()]

    scheduler.ready.clear()
    scheduler.drop_connection()
    await service.wait_for_health(False)
    with pytest.raises(aio.AioRpcError) as caught:
        await service.stub.Generate(request())
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE

    scheduler.ready.set()
    await service.wait_for_health(True)
    await scheduler.submits.get()
    for _ in range(11):
        scheduler.step()
    while not responses[-1].finish_reason:
        responses.append(await call.read())
    ids = hf(TEXT).input_ids
    expected = [ids[i % len(ids)] for i in range(12)]
    assert joined(responses) == (hf.decode(expected), expected)
    assert [r.token_offset for r in responses] == _offsets(responses)


async def test_without_tokens_any_priority_and_salt_may_be_used(service: Service) -> None:
    message = request(max_tokens=4)
    message.priority, message.cache_salt = -(2**31), "mine"
    await service.stub.Generate(message)
    submit = await service.scheduler.submits.get()
    assert not submit.HasField("client")
    assert (submit.priority, submit.cache_salt) == (-(2**31), ":mine")


async def test_a_request_is_one_log_line_without_its_text(service: Service, hf: Any) -> None:
    with structlog.testing.capture_logs() as lines:
        message = request("secret words", max_tokens=4)
        message.request_id = "mine"
        await service.stub.Generate(message)
        service.scheduler.automatic = False
        call = service.stub.GenerateStream(message)
        await service.scheduler.submits.get()
        await service.scheduler.submits.get()
        call.cancel()
        await service.scheduler.aborts.get()
    finished, cancelled = lines
    assert finished.pop("total_s") > 0
    assert finished.pop("peer").startswith("ipv4:127.0.0.1:")
    assert finished == {
        "log_level": "info",
        "event": "request ended",
        "request_id": "mine",
        "client": None,
        "method": "Generate",
        "model": "demo",
        "outcome": "LENGTH",
        "prompt_tokens": len(hf("secret words").input_ids),
        "cached_prompt_tokens": CACHED_PROMPT_TOKENS,
        "completion_tokens": 4,
    }
    assert cancelled["method"] == "GenerateStream"
    assert cancelled["outcome"] == "CANCELLED"
    assert "secret" not in str(lines)


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
    expected = {
        "temperature": pytest.approx(0.6),
        "top_k": 0,
        "top_p": 1,
        "min_p": 0,
        "repetition_penalty": 1,
    }
    assert {name: defaults[name] for name in expected} == expected
    assert model.capacity == pb.EngineCapacity(
        num_blocks=64,
        block_size=16,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        max_waiting=32,
        tensor_parallel_size=1,
    )


async def test_unseeded_requests_differ_and_a_seed_is_passed_on(service: Service) -> None:
    for sampling in ({}, {}, {"seed": 42}, {"temperature": 0}):
        await service.stub.Generate(request(max_tokens=1, **sampling))
    submits = [service.scheduler.submits.get_nowait().sampling for _ in range(4)]
    assert submits[0].seed != submits[1].seed
    assert submits[2].seed == 42
    assert submits[0].temperature == pytest.approx(0.6)
    assert submits[3].temperature == 0


async def test_health_follows_the_scheduler(service: Service) -> None:
    health = health_pb2_grpc.HealthStub(service.channel)
    for name in ("", SERVICE_NAME):
        reply = await health.Check(health_pb2.HealthCheckRequest(service=name))
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    await service.scheduler.stop()
    await service.wait_for_health(False)
    await service.scheduler.start()
    await service.wait_for_health(True)
    await service.stub.Generate(request(max_tokens=1))


async def test_reflection_lists_the_service(service: Service) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(service.channel)
    call = stub.ServerReflectionInfo(
        iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    )
    reply = await call.read()
    names = {each.name for each in reply.list_services_response.service}
    assert {SERVICE_NAME, "grpc.health.v1.Health"} <= names
    call.cancel()


def _chat(role: str) -> bytes:
    chat = pb.Chat(messages=[pb.ChatMessage(role=role, content="hi")])
    return pb.GenerateRequest(chat=chat).SerializeToString()


def _ids(*ids: int) -> bytes:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids)).SerializeToString()


BAD_MESSAGES = {
    "no prompt": (b"", "prompt: missing"),
    "both prompts": (request().SerializeToString() + _ids(1), "prompt: text and token_ids"),
    "empty text": (b"\x12\x00", "text: empty"),
    "empty token ids": (_ids(), "token_ids: empty"),
    "empty chat": (b"\x22\x00", "chat.messages: empty"),
    "unknown role": (_chat("wizard"), "chat.messages[0].role: unknown"),
    "token id out of range": (_ids(1, 1536), "token_ids[1]: 1536"),
    "huge token id": (_ids(2**32 - 1), "token_ids[0]: 4294967295"),
    "text too long": (request("word " * 200).SerializeToString(), "text: "),
    "text far too long": (request("x" * 500_000).SerializeToString(), "text: 500000 bytes"),
    "ids too long": (_ids(*[1] * 128), "token_ids: 128 tokens; the limit is 127"),
    "no room": (request(max_tokens=127).SerializeToString(), "sampling.max_tokens: 127; after"),
    "over the size limit": (request("x" * (2 << 20)).SerializeToString(), "message: 20971"),
    "garbage": (b"\xff\xfe\xfd garbage", "message: not a readable message"),
    "invalid UTF-8": (b"\x12\x02\xc3\x28", "message: not a readable message"),
    "out of range": (request(top_p=1.5).SerializeToString(), "sampling.top_p: 1.5 is out of range"),
    "contradiction": (
        request(beam_width=2, n=3).SerializeToString(),
        "sampling.beam_width: 2 cannot go with sampling.n",
    ),
    "empty structured output": (
        request(structured_output=pb.StructuredOutput()).SerializeToString(),
        "sampling.structured_output: empty",
    ),
    "resumed too far": (
        pb.GenerateRequest(
            text="hi", resume_token_ids=[1, 2], sampling=pb.SamplingParams(max_tokens=1)
        ).SerializeToString(),
        "resume_token_ids: 2 tokens; the limit is 1",
    ),
}


async def test_bad_messages_are_refused_and_do_no_harm(service: Service) -> None:
    raw = service.channel.unary_unary(GENERATE)
    raw_stream = service.channel.unary_stream(GENERATE + "Stream")
    for name, (data, message) in BAD_MESSAGES.items():
        for send in (raw, lambda data: raw_stream(data).read()):
            with pytest.raises(aio.AioRpcError) as caught:
                await send(data)
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT, name
            assert (caught.value.details() or "").startswith(message), name
            bad_request = _detail(caught.value, error_details_pb2.BadRequest)
            assert message.startswith(bad_request.field_violations[0].field), name
    assert service.scheduler.submits.empty()
    await service.stub.Generate(request(max_tokens=1))


@pytest.mark.parametrize(
    ("method", "message", "refusal"),
    [
        ("Tokenize", pb.TokenizeRequest(), "prompt: missing"),
        ("Tokenize", pb.TokenizeRequest(chat=pb.Chat()), "chat.messages: empty"),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[1536]), "token_ids[0]: 1536"),
    ],
)
async def test_bad_tokenizer_requests_are_refused(
    service: Service, method: str, message: Any, refusal: str
) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await getattr(service.stub, method)(message)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert (caught.value.details() or "").startswith(refusal)


async def _result(call: Any) -> Any:
    return await call


def _detail(error: aio.AioRpcError, kind: type[Any]) -> Any:
    """The status detail of type `kind` that came with an error."""
    trailers = dict(error.trailing_metadata())
    status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    detail = kind()
    assert status.details[0].Unpack(detail)
    return detail


def _offsets(responses: list[pb.GenerateStreamResponse]) -> list[int]:
    offsets, count = [], 0
    for response in responses:
        offsets.append(count)
        count += len(response.token_ids)
    return offsets


async def test_a_stop_string_does_not_hide_what_the_engine_said(service: Service) -> None:
    response = await service.stub.Generate(request(stop=["time"]))
    assert response.completions[0].stop_reason == "time"
    assert response.usage.cached_prompt_tokens == 3
    assert response.timings.queue_s == 0.25
