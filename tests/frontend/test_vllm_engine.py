"""vLLM's engine protocol, end to end over gRPC, beside the public service in the same process."""

from __future__ import annotations

import json
from collections.abc import Callable
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
from frontend.settings import FrontendSettings
from nano_vllm_grpc.pb import frontend_pb2 as pb
from shared.pb import scheduler_pb2
from tests.frontend.conftest import Service, bearer, rejection
from tests.frontend.fake_scheduler import (
    CACHED_PROMPT_TOKENS,
    INFO,
    FakeScheduler,
    echo_from_seed,
    logprob_row,
    logprob_rows,
)

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
async def test_callers_learn_what_was_cached_only_if_an_operator_allows_it(
    engine: Any, told: int, stream: bool
) -> None:
    """Callers over HTTP share one cache, so the number shows what other callers asked."""
    chunks, completes = await collect(engine.Generate(request(stream=stream)))
    assert {message.cached_tokens for message in (*chunks, *completes.values())} == {told}


ROOM = INFO.max_model_len - 12  # beside 12 tokens to generate


@pytest.mark.parametrize(
    ("prompt", "keep", "kept"),
    [
        ([7, 8, 9], None, [7, 8, 9]),
        ([7, 8, 9], 2, [8, 9]),
        ([7, 8, 9], 9, [7, 8, 9]),
        ([7, 8, 9], -1, [7, 8, 9]),
        ([*range(10, 310)], -1, [*range(310 - ROOM, 310)]),
        ("time " * 300, -1, None),
    ],
)
async def test_a_prompt_is_truncated_to_its_last_tokens(
    engine: Any, prompt: Any, keep: int | None, kept: list[int] | None
) -> None:
    message = request(**({} if keep is None else {"truncate_prompt_tokens": keep}))
    if kept is None:
        message.text = prompt
    else:
        message.tokenized.CopyFrom(vllm.TokenizedInput(original_text="ignored", input_ids=prompt))
    _, completes = await collect(engine.Generate(message))
    assert completes[0].prompt_tokens == (ROOM if kept is None else len(kept))
    if kept is not None:
        assert list(completes[0].output_ids) == (kept * 6)[:12]


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


async def test_tokens_that_arrive_together_are_chunks_of_their_own(
    service: Service, engine: Any
) -> None:
    """Gateways' parsers of thoughts miss markers that a chunk cuts."""
    service.scheduler.automatic = False
    call = engine.Generate(request(stream=True, logprobs=1))
    number = (await service.scheduler.submits.get()).request
    service.scheduler.send(
        [(number, offset, 7 + offset) for offset in range(5)],
        [scheduler_pb2.Finished(request=number, cause=scheduler_pb2.FINISH_CAUSE_LENGTH)],
        [logprob_rows(number, False, 0, [logprob_row(7 + i, i, 1) for i in range(5)])],
    )
    chunks, completes = await collect(call)
    assert [list(chunk.token_ids) for chunk in chunks] == [[7], [8], [9], [10], [11]]
    assert all(chunk.output_logprobs.token_ids == chunk.token_ids for chunk in chunks)
    assert list(completes[0].output_ids) == [7, 8, 9, 10, 11]


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


REJECTED: list[tuple[vllm.GenerateRequest, str]] = [
    (vllm.GenerateRequest(), "prompt: missing"),
    (request(top_p=1.5), "sampling.top_p: 1.5 is out of range"),
    (request(max_tokens=1 << 31), "sampling.max_tokens: 2147483648 is too large"),
    (request(max_tokens=500), "sampling.max_tokens: 500; this prompt leaves"),
    (request(top_k=1 << 31), "sampling.top_k: 2147483648 is too large"),
    (request(logit_bias={-4: 1.0}), "sampling.logit_bias: -4 is not a token id"),
    (request(json_schema="{"), "sampling.structured_output.json_schema: not JSON"),
    (request(choice=vllm.ChoiceConstraint()), "sampling.structured_output.choice.options: 0"),
    (request(truncate_prompt_tokens=0), "truncate_prompt_tokens: 0; must be -1 or above 0"),
    (request("word " * 300), "text: "),
    (_tokenized(data_parallel_rank=1), "data_parallel_rank: 1; the only rank is 0"),
    (_tokenized(mm_inputs=vllm.MultimodalInputs()), "mm_inputs: not supported: the model takes"),
    (_tokenized(media_refs=vllm.MediaRefs()), "media_refs: not supported: the model takes only"),
    (
        _tokenized(kv_transfer_params_json="{}"),
        "kv_transfer_params_json: not supported: one engine",
    ),
]


@pytest.mark.parametrize(("message", "reason"), REJECTED, ids=[reason for _, reason in REJECTED])
async def test_bad_requests_are_rejected_by_field(
    service: Service, engine: Any, message: vllm.GenerateRequest, reason: str
) -> None:
    code, details = await rejection(collect(engine.Generate(message)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith(reason)


async def test_embeddings_are_unimplemented(engine: Any) -> None:
    code, _ = await rejection(engine.Embed(vllm.EmbedRequest()))
    assert code is grpc.StatusCode.UNIMPLEMENTED


async def test_methods_for_operators_are_unimplemented(engine: Any) -> None:
    calls = (
        engine.FlushCache(common.FlushCacheRequest()),
        engine.StartProfile(common.StartProfileRequest()),
        engine.StopProfile(common.StopProfileRequest()),
    )
    for call in calls:
        code, details = await rejection(call)
        assert code is grpc.StatusCode.UNIMPLEMENTED
        assert details == "use the command line instead: nano-vllm-grpc down and up, or profile"


@pytest.mark.parametrize("settings", [{"engine_host": "0.0.0.0"}], indirect=True)
async def test_events_are_sent_on_loopback_only(engine: Any) -> None:
    code, _ = await rejection(engine.SubscribeKvEvents(common.SubscribeKvEventsRequest()).read())
    assert code is grpc.StatusCode.UNIMPLEMENTED


async def test_a_lost_cache_is_an_event(engine: Any, scheduler: FakeScheduler) -> None:
    cleared = scheduler_pb2.BlockEvent(cleared=True)
    load = scheduler_pb2.GetLoadResponse(blocks=1)
    scheduler.block_events.put_nowait(scheduler_pb2.BlockEvents(events=[cleared], load=load))
    call = engine.SubscribeKvEvents(common.SubscribeKvEventsRequest())
    await call.read()  # the snapshot
    assert [event.WhichOneof("data") for event in (await call.read()).events] == ["cleared"]


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


async def test_an_aborted_request_ends_with_its_tokens_so_far(
    service: Service, engine: Any, running: Callable[[str], Any]
) -> None:
    aborted, other = await running("a"), await running("b")
    await engine.Abort(vllm.AbortRequest(request_ids=["a", "unknown"]))
    _, completes = await collect(aborted)
    assert [complete.finish_reason for complete in completes.values()] == ["abort", "abort"]
    assert len(completes[0].output_ids) >= 1
    assert {await service.scheduler.aborts.get() for _ in range(2)}
    service.scheduler.step()
    assert (await other.read()).chunk.token_ids
    info = await engine.GetServerInfo(vllm.GetServerInfoRequest())
    assert info.active_requests == 1
    code, _ = await rejection(engine.Abort(vllm.AbortRequest(request_ids=["x"] * 5000)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT


async def test_model_and_server_information(service: Service, engine: Any, demo: Path) -> None:
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
    service: Service, engine: Any, settings: FrontendSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frontend.engines.engine._RECOVERY_S", 0.0)
    assert (await engine.HealthCheck(vllm.HealthCheckRequest())).healthy
    await service.scheduler.stop()
    await service.wait_for_health(False)
    health = await engine.HealthCheck(vllm.HealthCheckRequest())
    assert (health.healthy, health.message) == (False, "no engine is ready")
    code, _ = await rejection(collect(engine.Generate(request())))
    assert code is grpc.StatusCode.UNAVAILABLE
    async with aio.insecure_channel(settings.gateway_address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        status = (await check(health_pb2.HealthCheckRequest())).status
    assert status == health_pb2.HealthCheckResponse.NOT_SERVING


ACME, OTHER = "acme-token-0123456789", "other-token-0123456789"


@pytest.mark.parametrize(
    "settings",
    [{"tokens": f"{ACME} name=acme\n{OTHER} name=other\n", "engine_host": "0.0.0.0"}],
    indirect=True,
)
async def test_a_caller_cannot_abort_another_callers_request(service: Service, engine: Any) -> None:
    service.scheduler.automatic = False
    acme, other = bearer(ACME), bearer(OTHER)
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


async def test_the_public_port_does_not_serve_the_engine_protocol(service: Service) -> None:
    stub = VllmEngineStub(service.channel)  # type: ignore[no-untyped-call]
    code, _ = await rejection(stub.HealthCheck(vllm.HealthCheckRequest()))
    assert code is grpc.StatusCode.UNIMPLEMENTED
