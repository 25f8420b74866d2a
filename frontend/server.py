"""The public gRPC service: text in, text out."""

from __future__ import annotations

import asyncio
import time
import uuid
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog
from grpc import aio

from frontend import responses, validation
from frontend.audit import Audit
from frontend.auth import ClientInterceptor, Tokens
from frontend.call import CALL, Work
from frontend.completion import Delta
from frontend.generation import Generation, begin
from frontend.model_files import ModelFacts, read_model_facts
from frontend.request import Request
from frontend.responses import WholeCompletion, stream_response
from frontend.sampling_checks import check_resume, check_sampling
from frontend.scheduler_client import SchedulerClient
from frontend.settings import FrontendSettings
from frontend.tenants import engine_salt
from frontend.tokenizer import Tokenizer
from frontend.usage import Usage
from shared.errors import InvalidArgumentError
from shared.pb import frontend_pb2 as pb
from shared.pb.frontend_pb2_grpc import (
    InferenceServiceServicer,
    add_InferenceServiceServicer_to_server,
)
from shared.reading import let_go
from shared.server import Server

Context = aio.ServicerContext[Any, Any]
SERVICE_NAME = "nanovllm.v1.InferenceService"


class InferenceServicer(InferenceServiceServicer):
    """Serves `frontend.proto` for one model and one scheduler."""

    def __init__(self, facts: ModelFacts, tokenizer: Tokenizer, scheduler: SchedulerClient) -> None:
        self._facts = facts
        self._tokenizer = tokenizer
        self._scheduler = scheduler

    async def Generate(  # type: ignore[override]  # serialized already
        self, request: pb.GenerateRequest, context: Context
    ) -> bytes:
        generation = await self._start(request, context)
        del request
        let_go()
        wholes = [
            WholeCompletion(index, self._tokenizer.full_table)
            for index in range(generation.request.sampling.num_completions)
        ]
        prompt = b""
        while not generation.ended:
            for completion, delta in await generation.next_deltas():
                wholes[completion.index].add(delta)
                if delta.logprobs:
                    await asyncio.sleep(0)
                if delta.prompt_logprobs:
                    prompt = await self._prompt_logprobs(pb.GenerateResponse, delta)
        completions = [
            whole.end(ending) for whole, ending in zip(wholes, generation.endings, strict=True)
        ]
        request_id, totals = generation.request.request_id, generation.totals()
        return responses.whole_response(request_id, completions, totals) + prompt

    async def GenerateStream(  # type: ignore[override]  # writes rather than yields: less work
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        generation = await self._start(request, context)
        del request
        let_go()
        request_id, table = generation.request.request_id, self._tokenizer.full_table
        while not generation.ended:
            deltas = await generation.next_deltas()
            for completion, delta in deltas:
                last = generation.ended and delta is deltas[-1][1]
                totals = generation.totals() if last else None
                response = stream_response(request_id, completion, delta, totals, table)
                if delta.prompt_logprobs:
                    prompt = await self._prompt_logprobs(pb.GenerateStreamResponse, delta)
                    await context.write(response.SerializeToString() + prompt)
                else:
                    await context.write(response)

    async def _prompt_logprobs(
        self, message: type[pb.GenerateResponse | pb.GenerateStreamResponse], delta: Delta
    ) -> bytes:
        """Serializes a delta's `prompt_logprobs`, and lets go of them."""
        rows, delta.prompt_logprobs = delta.prompt_logprobs, ()
        table = self._tokenizer.full_table
        return await self._tokenizer.on_thread(
            lambda: responses.prompt_logprobs(message, rows, table)
        )

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        token_ids = await self._encode(request, validation.MAX_TOKENIZED)
        return pb.TokenizeResponse(token_ids=token_ids)

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        token_ids = validation.check_detokenized(request.token_ids, self._facts.vocab_size)
        return pb.DetokenizeResponse(text=await self._tokenizer.decode(token_ids))

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        return responses.model(self._facts, self._scheduler.engine_info)

    async def _start(self, message: pb.GenerateRequest, context: Context) -> Generation:
        """Checks a request and submits it.

        Raises:
            InvalidArgumentError: a field is wrong.
            UnavailableError: there is no engine to check it against.
        """
        received_at = time.monotonic()
        timeout_s = context.time_remaining()
        deadline = None if timeout_s is None else received_at + timeout_s
        checked = await self._checked(message, deadline)
        special = checked.sampling.show_special
        table = self._tokenizer.full_table if special else self._tokenizer.table
        generation = await begin(
            checked, self._scheduler, table, received_at, self._tokenizer.on_thread
        )

        def on_done(_: object) -> None:
            # However the call ends, even if the client goes away while a chunk is being written.
            generation.close()

        context.add_done_callback(on_done)  # type: ignore[arg-type]  # grpc's stubs want a class
        if call := CALL.get():
            call.work = lambda: _work(generation, self._facts.name)
        return generation

    async def _checked(self, message: pb.GenerateRequest, deadline: float | None) -> Request:
        """Turns a message into a checked, tokenized request."""
        validation.check_request(message)
        call = CALL.get()
        client = call.client if call else None
        if client is not None:
            validation.check_priority(message.priority, client.priorities)
        request_id = message.request_id or uuid.uuid4().hex
        structlog.contextvars.bind_contextvars(request_id=request_id)
        info = self._scheduler.engine_info
        prompt_ids = await self._prompt_ids(message, info.max_model_len, info.vocab_size)
        room = info.max_model_len - len(prompt_ids)
        sampling = check_sampling(message.sampling, self._facts, room, info.vocab_size)
        return Request(
            request_id,
            prompt_ids,
            sampling,
            deadline,
            message.priority,
            engine_salt(client, message.cache_salt),
            check_resume(message.resume_token_ids, sampling, info.vocab_size),
            client,
        )

    async def _prompt_ids(
        self, message: pb.GenerateRequest, max_model_len: int, vocab_size: int
    ) -> array[int]:
        if message.HasField("token_ids"):
            field = "token_ids"
            validation.check_prompt_length(field, len(message.token_ids.ids), max_model_len)
            # A copy: the field would keep the whole message alive, and is slow to walk over.
            prompt_ids = array("I", message.token_ids.ids)
        else:
            field = message.WhichOneof("prompt") or "prompt"
            prompt_ids = array("I", await self._encode(message, max_model_len - 1))
            validation.check_prompt_length(field, len(prompt_ids), max_model_len)
        validation.check_token_ids(field, prompt_ids, vocab_size)
        return prompt_ids

    async def _encode(
        self, message: pb.GenerateRequest | pb.TokenizeRequest, max_tokens: int
    ) -> list[int]:
        """The token ids of a message's text or chat.

        Raises:
            InvalidArgumentError: it is missing, not acceptable or has more than `max_tokens`.
        """
        if message.HasField("text"):
            return await self._tokenizer.encode_text(message.text, max_tokens)
        if message.HasField("chat"):
            messages = validation.check_messages(message.chat)
            return await self._tokenizer.encode_chat(messages, max_tokens)
        raise InvalidArgumentError("prompt", "missing; give one")


def public_server(settings: FrontendSettings, ready: Callable[[], object] | None = None) -> Server:
    """A server that admits callers with a token, each with a limited number of calls at a time.
    Frontends may share its port.

    Args:
        ready: as for `Server`.

    Raises:
        FileError: a file of certificates or tokens cannot be used.
    """
    path, max_requests = settings.auth_tokens_file, settings.max_requests_per_client
    tokens = Tokens(path) if path else None
    methods = pb.DESCRIPTOR.services_by_name["InferenceService"].methods_by_name
    paths = {f"/{SERVICE_NAME}/{name}": name for name in methods}
    return Server(
        settings,
        SERVICE_NAME,
        interceptors=[ClientInterceptor(tokens, max_requests, Audit(Usage()), paths)],
        reuse_port=True,
        ready=ready,
    )


async def serve(server: Server, settings: FrontendSettings) -> None:
    """Runs the service on `server` until it is told to stop.

    Raises:
        ModelFilesError: the model directory cannot be used.
        OSError: the address cannot be bound.
    """
    directory = Path(settings.model)
    facts = read_model_facts(directory)
    tokenizer = Tokenizer(directory, settings.tokenizer_threads)
    scheduler = SchedulerClient(
        settings.scheduler_address, server.set_serving, dialer=settings.dialer
    )
    servicer = InferenceServicer(facts, tokenizer, scheduler)
    add_InferenceServiceServicer_to_server(servicer, server.grpc)
    await server.start(f"{settings.host}:{settings.port}")
    async with asyncio.TaskGroup() as tasks:
        connection = tasks.create_task(scheduler.run())
        await server.wait()
        connection.cancel()
    tokenizer.close()


def _work(generation: Generation, model: str) -> Work:
    totals = generation.totals()
    reasons = {ending.reason.name for ending in generation.endings} if generation.ended else ()
    return Work(
        generation.request.request_id,
        model,
        totals.prompt_tokens,
        totals.cached_prompt_tokens,
        totals.completion_tokens,
        ",".join(sorted(reasons)),
    )
