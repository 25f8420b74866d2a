"""Serves vLLM's engine protocol, `vllm.grpc.engine.VllmEngine`, which HTTP gateways speak."""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from grpc import aio
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from frontend.api.generations import Generations
from frontend.api.vllm_engine import responses
from frontend.api.vllm_engine.kv_events import KvEventStream
from frontend.api.vllm_engine.requests import generate_request
from frontend.api.vllm_engine.tokenizer_files import TokenizerArchive
from frontend.callers.call import CALL, Call
from frontend.engines.engine import EngineClient
from frontend.generation import Generation
from shared.errors import (
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    OutOfRangeError,
    UnimplementedError,
)
from shared.pb import scheduler_pb2
from shared.sampling_params import DEFAULTS, NUMBERS

Context = aio.ServicerContext[Any, Any]
PROTOCOL = vllm.DESCRIPTOR.services_by_name["VllmEngine"]
SERVICE_NAME = "vllm.grpc.engine.VllmEngine"
add_to_server = vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server
_ARCHIVE_BYTES_AT_ONCE = 64 << 10
_LOAD_TIMEOUT_S = 10.0
_MAX_ABORTED = 4096  # requests per call


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Serves `vllm_engine.proto` for a text model."""

    def __init__(
        self,
        generations: Generations,
        directory: Path,
        *,
        report_cached_tokens: bool = False,
        sends_events: bool = False,
    ) -> None:
        """`directory`: of the model; `report_cached_tokens`: whether callers learn how much of a
        prompt was cached; `sends_events`: whether they may watch the cache, which slows all clients
        and reveals their prompts."""
        self._report_cached_tokens = report_cached_tokens
        self._sends_events = sends_events
        self._generations = generations
        self._directory = directory
        self._archive = TokenizerArchive(directory, generations.tokenizer.on_thread)
        self._began_at = time.monotonic()
        self._received_at = datetime.now(UTC)
        # By caller and request id, so that no caller aborts another caller's requests.
        self._open: defaultdict[tuple[str, str], list[Generation]] = defaultdict(list)

    async def Generate(self, request: vllm.GenerateRequest, context: Context) -> None:
        self._received_at = datetime.now(UTC)
        sampling, streamed = request.sampling_params, request.stream
        cut = sampling.HasField("truncate_prompt_tokens")
        truncate = sampling.truncate_prompt_tokens if cut else None
        generation = await self._generations.start(
            generate_request(request), context, truncate=truncate, with_text=False
        )
        del request, sampling
        with self._listed(generation):
            try:
                await self._write(generation, context, streamed)
            except InternalError as error:
                # The engine fails at this request. Gateways would retry it again and again.
                raise FailedPreconditionError(str(error)) from error

    async def _write(self, generation: Generation, context: Context, streamed: bool) -> None:
        count = generation.request.sampling.num_completions
        wholes = [responses.Complete() for _ in range(count)]
        prompt = b""
        while not generation.ended:
            deltas = await generation.next_deltas()
            shown = self._report_cached_tokens or _shares_cache()
            cached = generation.start.cached_prompt_tokens if shown else 0
            for completion, delta in deltas:
                whole = wholes[completion.index]
                whole.add(delta, logprobs=not streamed)
                if delta.logprobs:
                    await asyncio.sleep(0)
                if delta.prompt_logprobs:
                    prompt = await self._input_logprobs(generation, delta.prompt_logprobs, streamed)
                    delta.prompt_logprobs = ()
                if streamed and (delta.token_ids or prompt):
                    for chunk in responses.chunks(generation, completion, delta, cached):
                        await context.write(chunk + prompt)
                        prompt = b""
                if completion.ending is not None:
                    await context.write(whole.end(generation, completion, cached) + prompt)
                    prompt = b""

    async def _input_logprobs(self, generation: Generation, rows: Any, streamed: bool) -> bytes:
        prompt_ids = generation.request.prompt_ids
        return await self._generations.tokenizer.on_thread(
            lambda: responses.input_logprobs(rows, prompt_ids, streamed=streamed)
        )

    @contextmanager
    def _listed(self, generation: Generation) -> Iterator[None]:
        """Lets the caller abort a generation by its request id until the context ends."""
        key = _call().caller, generation.request.request_id
        self._open[key].append(generation)
        try:
            yield
        finally:
            self._open[key].remove(generation)
            if not self._open[key]:
                del self._open[key]

    async def Abort(self, request: vllm.AbortRequest, context: Context) -> vllm.AbortResponse:
        if len(request.request_ids) > _MAX_ABORTED:
            raise InvalidArgumentError(
                "request_ids", f"{len(request.request_ids)} given; the limit is {_MAX_ABORTED}"
            )
        caller = _call().caller
        for request_id in request.request_ids:
            for generation in self._open.get((caller, request_id), ()):
                generation.abort()
        return vllm.AbortResponse()

    async def Embed(self, request: vllm.EmbedRequest, context: Context) -> vllm.EmbedResponse:
        raise UnimplementedError("the model generates text, not embeddings")

    async def HealthCheck(
        self, request: vllm.HealthCheckRequest, context: Context
    ) -> vllm.HealthCheckResponse:
        serving = self._generations.engines.serving
        return vllm.HealthCheckResponse(
            healthy=serving, message="serving" if serving else "no engine is ready"
        )

    async def GetModelInfo(
        self, request: vllm.GetModelInfoRequest, context: Context
    ) -> vllm.GetModelInfoResponse:
        facts, info = self._generations.facts, self._generations.engines.engine_info
        path = str(self._directory.absolute())
        defaults = {
            name: value
            for name, value in asdict(facts.defaults).items()
            if NUMBERS[name].from_model and value != getattr(DEFAULTS, name)
        }
        return vllm.GetModelInfoResponse(
            model_path=path,
            served_model_name=facts.name,
            tokenizer_path=path,
            is_generation=True,
            max_context_length=info.max_model_len,
            max_req_input_len=info.max_model_len - 1,
            vocab_size=info.vocab_size,
            model_type=facts.model_type,
            architectures=facts.architectures,
            eos_token_ids=facts.eos_token_ids,
            bos_token_id=facts.bos_token_id,
            pad_token_id=facts.pad_token_id,
            default_sampling_params_json=json.dumps(defaults) if defaults else "",
        )

    async def GetServerInfo(
        self, request: vllm.GetServerInfoRequest, context: Context
    ) -> vllm.GetServerInfoResponse:
        info = self._generations.engines.engine_info
        return vllm.GetServerInfoResponse(
            active_requests=sum(map(len, self._open.values())),
            last_receive_timestamp=self._received_at.timestamp(),
            uptime_seconds=time.monotonic() - self._began_at,
            server_type="vllm-grpc",
            data_parallel_size=1,
            block_size=info.block_size,
            max_num_seqs=info.max_num_seqs,
            constrained_decoding_start="first_token",
        )

    async def GetLoads(
        self, request: vllm.GetLoadsRequest, context: Context
    ) -> vllm.GetLoadsResponse:
        engines = self._generations.engines.connected()
        message = scheduler_pb2.GetLoadRequest()

        async def load(engine: EngineClient) -> scheduler_pb2.GetLoadResponse:
            with engine.connection.stub() as stub:
                return await stub.GetLoad(message, timeout=_LOAD_TIMEOUT_S)

        loads = await asyncio.gather(*map(load, engines))
        return vllm.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            dp_rank_count=len(engines),
            loads=[
                responses.engine_load(rank, load, engine.engine_info)
                for rank, (load, engine) in enumerate(zip(loads, engines, strict=True))
            ],
        )

    async def _operate(self, request: Any, context: Context) -> NoReturn:
        raise UnimplementedError(
            "use the command line instead: nano-vllm-grpc down and up, or profile"
        )

    FlushCache = StartProfile = StopProfile = _operate

    async def SubscribeKvEvents(
        self, request: common.SubscribeKvEventsRequest, context: Context
    ) -> AsyncIterator[common.KvEventBatch]:
        if not self._sends_events:
            raise UnimplementedError("events of the cache are sent on loopback only")
        if request.start_sequence_number:
            raise OutOfRangeError(
                "start_sequence_number: past events are not kept; give 0 to begin with a snapshot"
            )
        engines = self._generations.engines.connected()
        if len(engines) > 1:
            raise FailedPreconditionError(
                f"there is no single cache to watch: this frontend has {len(engines)} engines and "
                "chooses the one that has a request's prefix"
            )
        stream = KvEventStream(engines[0].engine_info)
        with engines[0].connection.stub() as stub:
            call = stub.WatchBlocks(scheduler_pb2.WatchBlocksRequest())
            try:
                async for message in call:
                    yield stream.batch(message)
            finally:
                call.cancel()

    async def GetTokenizer(
        self, request: common.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[common.GetTokenizerChunk]:
        archive, sha256 = await self._archive.read()
        for start in range(0, len(archive), _ARCHIVE_BYTES_AT_ONCE):
            yield common.GetTokenizerChunk(data=archive[start : start + _ARCHIVE_BYTES_AT_ONCE])
        yield common.GetTokenizerChunk(sha256=sha256)


def _call() -> Call:
    call = CALL.get()
    assert call is not None, "set by the interceptor"
    return call


def _shares_cache() -> bool:
    client = _call().client
    return client is not None and client.cache == "shared"
