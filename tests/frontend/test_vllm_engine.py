"""vLLM's engine protocol, end to end over gRPC, beside the public service in the same process."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator, Callable
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

from deploy.ports import free_port
from frontend.api.vllm_engine.kv_events import KvEventStream
from frontend.api.vllm_engine.tokenizer_files import TokenizerArchive
from frontend.settings import FrontendSettings
from frontend.text.threads import FairThreads
from nano_vllm_grpc.pb import frontend_pb2 as pb
from shared.pb import scheduler_pb2
from tests.frontend.conftest import Service
from tests.frontend.fake_scheduler import (
    CACHED_PROMPT_TOKENS,
    INFO,
    FakeScheduler,
    echo_from_seed,
    logprob_row,
)
from tests.turns import counting_turns

TEXT = "Once upon a time, 你好 👍🏽!"


@pytest.fixture
def settings(
    settings: FrontendSettings, request: pytest.FixtureRequest, tmp_path: Path
) -> FrontendSettings:
    """`request.param`: more of them, the `tokens` in the file of tokens, and the `engine_host`."""
    more = dict(getattr(request, "param", {}))
    address = f"{more.pop('engine_host', '127.0.0.1')}:{free_port()}"
    if tokens := more.pop("tokens", ""):
        (tmp_path / "tokens").write_text(tokens)
        more["auth_tokens_file"] = str(tmp_path / "tokens")
    return settings.model_copy(update={"gateway_addresses": (address,), **more})


@pytest.fixture
async def engine(service: Service, settings: FrontendSettings) -> AsyncIterator[Any]:
    """A client of the engine protocol."""
    port = settings.gateway_address.rpartition(":")[2]
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await channel.channel_ready()
        yield VllmEngineStub(channel)  # type: ignore[no-untyped-call]


def request(text: str = TEXT, stream: bool = False, **sampling: Any) -> vllm.GenerateRequest:
    params = vllm.SamplingParams(**({"max_tokens": 12} | sampling))
    return vllm.GenerateRequest(text=text, stream=stream, sampling_params=params)


async def collect(call: Any) -> tuple[list[Any], dict[int, Any]]:
    """The chunks of a call, and the last message about each completion."""
    chunks, completes = [], {}
    while (response := await call.read()) is not aio.EOF:
        if response.HasField("chunk"):
            assert response.chunk.index not in completes
            chunks.append(response.chunk)
        else:
            assert response.complete.index not in completes
            completes[response.complete.index] = response.complete
    return chunks, completes


def tokens_of(chunks: list[Any], index: int) -> list[int]:
    return [token for chunk in chunks if chunk.index == index for token in chunk.token_ids]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({}, {}),
        ({"n": 3, "seed": 5}, {"n": 3, "seed": 5}),
        ({"stop": ["你好", "zzz"]}, {"stop": ["你好", "zzz"]}),
        ({"stop": ["time"], "include_stop_str_in_output": True}, {"stop": ["time"]}),
        ({"stop_token_ids": [5, 18]}, {"stop_token_ids": [5, 18]}),
        ({"ignore_eos": True, "min_tokens": 3}, {"ignore_eos": True, "min_tokens": 3}),
    ],
)
async def test_both_interfaces_answer_alike(
    service: Service, engine: Any, theirs: dict[str, Any], ours: dict[str, Any], stream: bool
) -> None:
    service.scheduler.next_token = echo_from_seed
    message = pb.GenerateRequest(
        text=TEXT, sampling=pb.SamplingParams(**({"max_tokens": 12, "seed": 0} | ours))
    )
    whole = await service.stub.Generate(message)
    chunks, completes = await collect(
        engine.Generate(request(**({"seed": 0} | theirs), stream=stream))
    )
    assert sorted(completes) == list(range(len(whole.completions)))
    for completion in whole.completions:
        complete = completes[completion.index]
        assert list(complete.output_ids) == list(completion.token_ids)
        assert complete.completion_tokens == len(completion.token_ids)
        assert complete.prompt_tokens == whole.usage.prompt_tokens
        reasons = {pb.FINISH_REASON_LENGTH: "length"}
        assert complete.finish_reason == reasons.get(completion.finish_reason, "stop")
        kind = complete.WhichOneof("matched_stop")
        assert (str(getattr(complete, kind)) if kind else "") == completion.stop_reason
        assert kind != "matched_stop_str" or "stop" in theirs
        told = tokens_of(chunks, completion.index)
        assert told == (list(completion.token_ids) if stream else [])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({}, 0),
        ({"report_cached_tokens": True}, CACHED_PROMPT_TOKENS),
        ({"tokens": f"{'t' * 16} name=http\n"}, 0),
        ({"tokens": f"{'t' * 16} name=http cache=shared\n"}, CACHED_PROMPT_TOKENS),
    ],
    indirect=["settings"],
    ids=["hidden", "reported", "hidden with names", "shared with names"],
)
async def test_only_an_operator_has_callers_told_what_was_cached(
    engine: Any, told: int, stream: bool
) -> None:
    """Callers over HTTP share one cache: the number shows what others asked."""
    chunks, completes = await collect(engine.Generate(request(stream=stream)))
    assert {message.cached_tokens for message in (*chunks, *completes.values())} == {told}


async def test_tokenized_prompts_are_taken_as_they_are(service: Service, engine: Any) -> None:
    message = request()
    message.tokenized.CopyFrom(vllm.TokenizedInput(original_text="ignored", input_ids=[7, 8, 9]))
    _, completes = await collect(engine.Generate(message))
    assert list(completes[0].output_ids) == [7, 8, 9] * 4
    assert completes[0].prompt_tokens == 3


@pytest.mark.parametrize(("keep", "kept"), [(2, [8, 9]), (9, [7, 8, 9]), (-1, [7, 8, 9])])
async def test_a_prompt_is_truncated_to_its_last_tokens(
    service: Service, engine: Any, keep: int, kept: list[int]
) -> None:
    message = request(truncate_prompt_tokens=keep)
    message.tokenized.input_ids.extend([7, 8, 9])
    _, completes = await collect(engine.Generate(message))
    assert list(completes[0].output_ids[: len(kept)]) == kept
    assert completes[0].prompt_tokens == len(kept)


@pytest.mark.parametrize("prompt", ["text", "tokenized"])
async def test_minus_one_keeps_as_much_of_a_prompt_as_leaves_room(
    service: Service, engine: Any, prompt: str
) -> None:
    message = request("time " * 300, truncate_prompt_tokens=-1)
    if prompt == "tokenized":
        message.tokenized.input_ids.extend(range(10, 310))
    _, completes = await collect(engine.Generate(message))
    assert completes[0].prompt_tokens == INFO.max_model_len - 12
    if prompt == "tokenized":
        assert completes[0].output_ids[0] == 310 - completes[0].prompt_tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_of_prompt_and_output(service: Service, engine: Any, stream: bool) -> None:
    message = request(logprobs=2, prompt_logprobs=1, stream=stream)
    message.tokenized.input_ids.extend([7, 8, 9])
    chunks, completes = await collect(engine.Generate(message))
    parts = chunks if stream else list(completes.values())
    tokens = [t for part in parts for t in part.output_logprobs.token_ids]
    values = [v for part in parts for v in part.output_logprobs.token_logprobs]
    tops = [t for part in parts for t in part.output_logprobs.top_logprobs]
    rows = [logprob_row(token, position, 2) for position, token in enumerate([7, 8, 9] * 4)]
    assert list(zip(tokens, values, strict=True)) == [row[0] for row in rows]
    assert [list(zip(t.token_ids, t.values, strict=True)) for t in tops] == [r[1:] for r in rows]
    first = parts[0].input_logprobs
    assert list(first.token_ids) == [7, 8, 9]
    assert [v.HasField("value") for v in first.token_logprobs] == [False, True, True]
    assert [v.value for v in first.token_logprobs] == [0, -1.25, -2.25]
    assert [list(t.token_ids) for t in first.top_logprobs] == [[], [0], [0]]
    assert not any(part.HasField("input_logprobs") for part in parts[1:])


async def test_unset_parameters_are_the_models_and_zero_turns_filters_off(
    service: Service, engine: Any
) -> None:
    await collect(engine.Generate(request()))
    unset = (await service.scheduler.submits.get()).sampling
    await service.stub.Generate(
        pb.GenerateRequest(text=TEXT, sampling=pb.SamplingParams(max_tokens=12, top_k=0, min_p=0))
    )
    ours = (await service.scheduler.submits.get()).sampling
    unset.seed = ours.seed = 0
    assert unset == ours
    given = {"temperature": 0.5, "top_p": 0.25, "top_k": 4, "min_p": 0.125, "seed": -3}
    await collect(engine.Generate(request(**given, logit_bias={4: 2.5}, repetition_penalty=1.5)))
    sampling = (await service.scheduler.submits.get()).sampling
    assert sampling.seed == 2**64 - 3
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 4)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.125, 1.5)


@pytest.mark.parametrize(
    "constraint",
    [
        {"json_schema": '{"type": "object"}'},
        {"regex": "[a-z]+"},
        {"grammar": 'root ::= "a"'},
        {"structural_tag": "{}"},
        {"json_object": True},
        {"choice": vllm.ChoiceConstraint(choices=["a", "b c"])},
    ],
    ids=lambda constraint: next(iter(constraint)),
)
async def test_every_constraint_reaches_the_engine(
    service: Service, engine: Any, constraint: dict[str, Any]
) -> None:
    await collect(engine.Generate(request(**constraint)))
    theirs = (await service.scheduler.submits.get()).sampling.grammar
    ((kind, value),) = constraint.items()
    ours = {kind: pb.Choice(options=value.choices) if kind == "choice" else value}
    sampling = pb.SamplingParams(structured_output=pb.StructuredOutput(**ours))
    await service.stub.Generate(pb.GenerateRequest(text=TEXT, sampling=sampling))
    assert theirs == (await service.scheduler.submits.get()).sampling.grammar
    assert theirs.kind


def _tokenized(**fields: Any) -> vllm.GenerateRequest:
    return vllm.GenerateRequest(tokenized=vllm.TokenizedInput(input_ids=[5]), **fields)


REFUSED: list[tuple[vllm.GenerateRequest, str]] = [
    (vllm.GenerateRequest(), "prompt: missing"),
    (request(top_p=1.5), "sampling.top_p: 1.5 is out of range"),
    (request(max_tokens=1 << 31), "sampling.max_tokens: 2147483648 is too large"),
    (request(max_tokens=500), "sampling.max_tokens: 500; after this prompt"),
    (request(top_k=1 << 31), "sampling.top_k: 2147483648 is too large"),
    (request(logit_bias={-4: 1.0}), "sampling.logit_bias: -4 is no token's id"),
    (request(json_schema="{"), "sampling.structured_output.json_schema: not JSON"),
    (request(choice=vllm.ChoiceConstraint()), "sampling.structured_output.choice.options: 0"),
    (request(truncate_prompt_tokens=0), "truncate_prompt_tokens: 0; must be -1 or above 0"),
    (request("word " * 300), "text: "),
    (_tokenized(data_parallel_rank=1), "data_parallel_rank: 1; the only rank is 0"),
    (_tokenized(mm_inputs=vllm.MultimodalInputs()), "mm_inputs: not supported: the model reads"),
    (_tokenized(media_refs=vllm.MediaRefs()), "media_refs: not supported: the model reads text"),
    (
        _tokenized(kv_transfer_params_json="{}"),
        "kv_transfer_params_json: not supported: one engine",
    ),
]


@pytest.mark.parametrize(("message", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
async def test_what_cannot_be_done_is_refused_before_anything_is_sent(
    service: Service, engine: Any, message: vllm.GenerateRequest, reason: str
) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await collect(engine.Generate(message))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (caught.value.details() or "").startswith(reason)


async def test_embeddings_are_unimplemented(engine: Any) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await engine.Embed(vllm.EmbedRequest())
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_what_is_for_operators_is_off_without_any(engine: Any) -> None:
    calls = (
        engine.FlushCache(common.FlushCacheRequest()),
        engine.StartProfile(common.StartProfileRequest()),
        engine.StopProfile(common.StopProfileRequest()),
    )
    for call in calls:
        with pytest.raises(aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "operator_tokens_file" in (caught.value.details() or "")


@pytest.mark.parametrize("settings", [{"engine_host": "0.0.0.0"}], indirect=True)
async def test_beyond_loopback_events_are_for_operators(engine: Any) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await engine.SubscribeKvEvents(common.SubscribeKvEventsRequest()).read()
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_events_for_many_are_translated_one_batch_per_turn(
    engine: Any, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    translate = KvEventStream.batch
    with counting_turns() as turns:

        def batch(self: KvEventStream, message: scheduler_pb2.BlockEvents) -> common.KvEventBatch:
            turns.done(1)
            return translate(self, message)

        monkeypatch.setattr(KvEventStream, "batch", batch)
        message = scheduler_pb2.BlockEvents(load=scheduler_pb2.GetLoadResponse(blocks=1))
        for _ in range(400):
            scheduler.block_events.put_nowait(message)
        calls = [engine.SubscribeKvEvents(common.SubscribeKvEventsRequest()) for _ in range(8)]
        for call in calls:
            await call.read()
        await asyncio.wait_for(scheduler.block_events.join(), 60)
    assert turns.total > len(calls)
    assert turns.max == 1


@pytest.fixture
async def running(scheduler: FakeScheduler, service: Service, engine: Any) -> Callable[[str], Any]:
    """Starts streams of which each has its first token."""
    scheduler.automatic = False

    async def run(request_id: str) -> Any:
        message = request(stream=True, n=2)
        message.request_id = request_id
        call = engine.Generate(message)
        await scheduler.submits.get()
        scheduler.step()
        await call.read()
        await call.read()
        return call

    return run


async def test_an_aborted_request_ends_with_what_it_has(
    service: Service, engine: Any, running: Callable[[str], Any]
) -> None:
    aborted, other = await running("a"), await running("b")
    await engine.Abort(vllm.AbortRequest(request_ids=["a", "unknown"]))
    _, completes = await collect(aborted)
    assert [complete.finish_reason for complete in completes.values()] == ["abort", "abort"]
    assert len(completes[0].output_ids) >= 1
    assert {service.scheduler.aborts.get_nowait() for _ in range(2)}
    service.scheduler.step()
    assert (await other.read()).chunk.token_ids
    info = await engine.GetServerInfo(vllm.GetServerInfoRequest())
    assert info.active_requests == 1
    with pytest.raises(aio.AioRpcError) as caught:
        await engine.Abort(vllm.AbortRequest(request_ids=["x"] * 5000))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_cancelled_call_is_dropped_by_the_engine(
    service: Service, running: Callable[[str], Any]
) -> None:
    (await running("a")).cancel()
    for _ in range(2):
        await asyncio.wait_for(service.scheduler.aborts.get(), 60)


async def test_the_deadline_of_a_call_reaches_the_engine(service: Service, engine: Any) -> None:
    call = engine.Generate(request(), timeout=100)
    await collect(call)
    assert 90 < (await service.scheduler.submits.get()).timeout_s < 102


async def test_what_gateways_ask_before_they_send_requests(
    service: Service, engine: Any, demo: Path
) -> None:
    model = await engine.GetModelInfo(vllm.GetModelInfoRequest())
    config = json.loads((demo / "config.json").read_text())
    assert (model.served_model_name, model.model_path) == ("demo", str(demo))
    assert (model.max_context_length, model.vocab_size) == (128, 1536)
    assert list(model.architectures) == config["architectures"]
    assert model.model_type == "qwen3"
    assert model.is_generation
    assert list(model.eos_token_ids) == [1535, 1533]
    server = await engine.GetServerInfo(vllm.GetServerInfoRequest())
    assert (server.block_size, server.max_num_seqs, server.data_parallel_size) == (16, 8, 1)
    assert server.uptime_seconds > 0


async def test_health_and_the_engine_protocol_follow_the_engine(
    service: Service, engine: Any, settings: FrontendSettings
) -> None:
    assert (await engine.HealthCheck(vllm.HealthCheckRequest())).healthy
    await service.scheduler.stop()
    await service.wait_for_health(False)
    health = await engine.HealthCheck(vllm.HealthCheckRequest())
    assert (health.healthy, health.message) == (False, "no engine is ready")
    with pytest.raises(aio.AioRpcError) as caught:
        await collect(engine.Generate(request()))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    async with aio.insecure_channel(settings.gateway_address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        status = (await check(health_pb2.HealthCheckRequest())).status
    assert status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_the_tokenizer_comes_as_an_archive(engine: Any, demo: Path) -> None:
    chunks = [chunk async for chunk in engine.GetTokenizer(common.GetTokenizerRequest())]
    data = b"".join(chunk.data for chunk in chunks)
    assert chunks[-1].sha256 == sha256(data).hexdigest()
    assert not any(chunk.sha256 for chunk in chunks[:-1])
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.read("tokenizer.json") == (demo / "tokenizer.json").read_bytes()
        assert "model.safetensors" not in archive.namelist()


async def test_the_archive_is_made_once_however_many_ask(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    make = TokenizerArchive._make

    def counted(archive: TokenizerArchive) -> tuple[bytes, str]:
        made.append(archive)
        return make(archive)

    monkeypatch.setattr(TokenizerArchive, "_make", counted)

    async def sha256_told() -> str:
        call = engine.GetTokenizer(common.GetTokenizerRequest())
        return [chunk async for chunk in call][-1].sha256

    told = await asyncio.gather(*(sha256_told() for _ in range(8)))
    assert len(set(told)) == len(made) == 1


async def test_the_archive_is_made_anew_when_the_files_change(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    threads = FairThreads(1, "test")
    archive = TokenizerArchive(tmp_path, partial(threads.run, ""))
    first = await archive.read()
    assert await archive.read() is first
    (tmp_path / "tokenizer.json").write_text("[1, 2]")
    assert (await archive.read())[1] != first[1]
    threads.close()


ACME, OTHER = "acme-token-0123456789", "other-token-0123456789"


@pytest.mark.parametrize(
    "settings",
    [{"tokens": f"{ACME} name=acme\n{OTHER} name=other\n", "engine_host": "0.0.0.0"}],
    indirect=True,
)
async def test_nobody_aborts_anothers_request(service: Service, engine: Any) -> None:
    service.scheduler.automatic = False
    acme, other = ((("authorization", f"Bearer {token}"),) for token in (ACME, OTHER))
    message = request(stream=True)
    message.request_id = "1"
    call = engine.Generate(message, metadata=acme)
    await service.scheduler.submits.get()
    service.scheduler.step()
    await call.read()
    abort = vllm.AbortRequest(request_ids=["1"])
    await engine.Abort(abort, metadata=other)
    service.scheduler.step()
    assert (await call.read()).chunk.token_ids
    await engine.Abort(abort, metadata=acme)
    _, completes = await collect(call)
    assert completes[0].finish_reason == "abort"


@pytest.mark.parametrize(
    "settings", [{"tokens": f"{ACME} name=acme\n{OTHER} name=http max_requests=1\n"}], indirect=True
)
async def test_the_gateway_is_the_client_http_without_a_token(
    service: Service, engine: Any
) -> None:
    service.scheduler.automatic = False
    first = engine.Generate(request(stream=True))
    submit = await service.scheduler.submits.get()
    assert submit.client.name == "http"
    with pytest.raises(aio.AioRpcError) as caught:
        await collect(engine.Generate(request()))
    assert "max_requests" in (caught.value.details() or "")
    with pytest.raises(aio.AioRpcError) as caught:
        await service.stub.Generate(pb.GenerateRequest(text=TEXT))
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    first.cancel()


@pytest.mark.parametrize("settings", [{}, {"tokens": f"{ACME} name=acme\n"}], indirect=True)
async def test_another_users_process_is_no_gateway(engine: Any, settings: FrontendSettings) -> None:
    """Not even with a client's token, and before its message is read."""
    if os.geteuid():
        pytest.skip("only root can start another user's process")
    program = """if True:
        import os, sys
        import grpc
        from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
        from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub
        os.setuid(65534)
        with grpc.insecure_channel(sys.argv[1]) as channel:
            try:
                for _ in VllmEngineStub(channel).Generate(
                    vllm.GenerateRequest(), metadata=(("authorization", f"Bearer {sys.argv[2]}"),)
                ):
                    pass
            except grpc.RpcError as error:
                print(error.code().name, error.details())
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program, settings.gateway_address, ACME),
        stdout=subprocess.PIPE,
    )
    told, _ = await process.communicate()
    assert told.decode() == (
        "PERMISSION_DENIED for processes of the user that runs this stack alone\n"
    )
    assert (await engine.HealthCheck(vllm.HealthCheckRequest())).healthy


async def test_the_public_port_does_not_serve_the_engine_protocol(service: Service) -> None:
    stub = VllmEngineStub(service.channel)  # type: ignore[no-untyped-call]
    with pytest.raises(aio.AioRpcError) as caught:
        await stub.HealthCheck(vllm.HealthCheckRequest())
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
