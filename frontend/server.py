"""The public gRPC service: text in, text out."""

from __future__ import annotations

import asyncio
import gc
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog
from grpc import aio

from frontend import validation
from frontend.generation import Ending, Generation
from frontend.model_files import ModelFacts, read_model_facts
from frontend.request import Request
from frontend.scheduler_client import SchedulerClient
from frontend.token_stream import FinishReason
from frontend.tokenizer import Tokenizer
from shared.config import FrontendSettings
from shared.errors import InvalidArgumentError
from shared.pb import frontend_pb2 as pb
from shared.pb.frontend_pb2_grpc import (
    InferenceServiceServicer,
    add_InferenceServiceServicer_to_server,
)
from shared.server import Server

log = structlog.get_logger(__name__)

Context = aio.ServicerContext[Any, Any]
SERVICE_NAME = "nanovllm.v1.InferenceService"

_FINISH_REASONS = {
    FinishReason.EOS: pb.FINISH_REASON_EOS,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
}


class InferenceServicer(InferenceServiceServicer):
    """Serves `frontend.proto` for one model and one scheduler."""

    def __init__(self, facts: ModelFacts, tokenizer: Tokenizer, scheduler: SchedulerClient) -> None:
        self._facts = facts
        self._tokenizer = tokenizer
        self._scheduler = scheduler

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        generation = await self._start(request, context)
        parts: list[str] = []
        token_ids: list[int] = []
        while generation.ending is None:
            delta = await generation.next_delta()
            parts.append(delta.text)
            token_ids += delta.token_ids
        ending = generation.ending
        self._scheduler.close(generation.stream)
        completion = pb.Completion(
            text="".join(parts),
            token_ids=token_ids,
            finish_reason=_FINISH_REASONS[ending.reason],
            stop_reason=ending.stop_reason,
        )
        return pb.GenerateResponse(
            request_id=generation.stream.request.request_id,
            completions=[completion],
            usage=_usage(ending),
            timings=_timings(ending),
        )

    async def GenerateStream(  # type: ignore[override]  # writes instead of yielding: less work
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        generation = await self._start(request, context)
        request_id = generation.stream.request.request_id
        while generation.ending is None:
            delta = await generation.next_delta()
            response = pb.GenerateStreamResponse(
                request_id=request_id,
                text=delta.text,
                token_ids=delta.token_ids,
                token_offset=delta.offset,
            )
            if (ending := generation.ending) is not None:
                # After a stop string the blocks are free before the client has read on.
                self._scheduler.close(generation.stream)
                response.finish_reason = _FINISH_REASONS[ending.reason]
                response.stop_reason = ending.stop_reason
                response.usage.CopyFrom(_usage(ending))
                response.timings.CopyFrom(_timings(ending))
            await context.write(response)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        return pb.TokenizeResponse(token_ids=await self._encode(request))

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        validation.check_token_ids("token_ids", request.token_ids, self._facts.vocab_size)
        return pb.DetokenizeResponse(text=await self._tokenizer.decode(request.token_ids))

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        info = self._scheduler.engine_info
        return pb.GetModelResponse(
            model=self._facts.name,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            eos_token_ids=self._facts.eos_token_ids,
            default_sampling=pb.SamplingParams(temperature=self._facts.temperature),
            capacity=pb.EngineCapacity(
                num_blocks=info.num_blocks,
                block_size=info.block_size,
                max_num_seqs=info.max_num_seqs,
                max_num_batched_tokens=info.max_num_batched_tokens,
                max_waiting=info.max_waiting,
                tensor_parallel_size=info.tensor_parallel_size,
            ),
        )

    async def _start(self, message: pb.GenerateRequest, context: Context) -> Generation:
        """Checks a request and submits it.

        Raises:
            InvalidArgumentError: a field is wrong.
            UnavailableError: there is no engine to check it against.
        """
        received_at = time.monotonic()
        timeout_s = context.time_remaining()
        deadline = None if timeout_s is None else received_at + timeout_s
        stream = self._scheduler.submit(await self._checked(message, deadline))
        generation = Generation(stream, self._tokenizer.table, received_at)

        def on_done(_: object) -> None:
            # However the call ends: also when the client goes away while a chunk is being written.
            self._scheduler.close(stream)
            _log_end(generation)

        context.add_done_callback(on_done)  # type: ignore[arg-type]  # grpc's stubs want a class
        return generation

    async def _checked(self, message: pb.GenerateRequest, deadline: float | None) -> Request:
        """The request that a message asks for."""
        validation.check_request(message)
        request_id = message.request_id or uuid.uuid4().hex
        structlog.contextvars.bind_contextvars(request_id=request_id)
        info = self._scheduler.engine_info
        prompt_ids = await self._prompt_ids(message, info.max_model_len, info.vocab_size)
        room = info.max_model_len - len(prompt_ids)
        sampling = validation.check_sampling(message.sampling, self._facts, room, info.vocab_size)
        return Request(
            request_id, prompt_ids, sampling, deadline, message.priority, message.cache_salt
        )

    async def _prompt_ids(
        self, message: pb.GenerateRequest, max_model_len: int, vocab_size: int
    ) -> Sequence[int]:
        prompt_ids: Sequence[int]
        if message.HasField("token_ids"):
            field, prompt_ids = "token_ids", message.token_ids.ids
        else:
            field = message.WhichOneof("prompt") or "prompt"
            prompt_ids = await self._encode(message, max_model_len - 1)
        validation.check_prompt_length(field, len(prompt_ids), max_model_len)
        validation.check_token_ids(field, prompt_ids, vocab_size)
        return prompt_ids

    async def _encode(
        self, message: pb.GenerateRequest | pb.TokenizeRequest, max_tokens: int | None = None
    ) -> list[int]:
        """The token ids of a message's text or chat."""
        if message.HasField("text"):
            return await self._tokenizer.encode_text(message.text, max_tokens)
        if message.HasField("chat"):
            messages = validation.check_messages(message.chat)
            return await self._tokenizer.encode_chat(messages, max_tokens)
        raise InvalidArgumentError("prompt", "missing; give one")


async def serve(server: Server, settings: FrontendSettings) -> None:
    """Runs the service on `server` until it is told to stop.

    Raises:
        ModelFilesError: the model directory cannot be used.
        OSError: the address cannot be bound.
    """
    directory = Path(settings.model)
    facts = read_model_facts(directory)
    tokenizer = Tokenizer(directory, settings.tokenizer_threads)
    scheduler = SchedulerClient(settings.scheduler_address, server.set_serving)
    servicer = InferenceServicer(facts, tokenizer, scheduler)
    add_InferenceServiceServicer_to_server(servicer, server.grpc)
    # What was loaded stays: the garbage collector need not walk over it again and again.
    gc.freeze()
    await server.start(f"{settings.host}:{settings.port}")
    async with asyncio.TaskGroup() as tasks:
        connection = tasks.create_task(scheduler.run())
        await server.wait()
        connection.cancel()
    tokenizer.close()


def _usage(ending: Ending) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=ending.prompt_tokens,
        cached_prompt_tokens=ending.cached_prompt_tokens,
        completion_tokens=ending.completion_tokens,
    )


def _timings(ending: Ending) -> pb.Timings:
    return pb.Timings(
        queue_s=ending.queue_s, first_token_s=ending.first_token_s, total_s=ending.total_s
    )


def _log_end(generation: Generation) -> None:
    """One line for each request that was submitted."""
    stream, ending = generation.stream, generation.ending
    if ending is not None:
        outcome = ending.reason.name
    else:
        outcome = stream.error.code.name if stream.error is not None else "CANCELLED"
    log.info(
        "request ended",
        request_id=stream.request.request_id,
        outcome=outcome,
        prompt_tokens=len(stream.request.prompt_ids),
        completion_tokens=ending.completion_tokens if ending else len(stream.tokens),
        total_s=round(generation.elapsed_s(), 4),
    )
