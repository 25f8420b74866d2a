"""Starts generations: checks a request, tokenizes its prompt and submits it to the engines."""

from __future__ import annotations

import time
import uuid
from array import array
from collections.abc import Sequence
from typing import Any

import structlog
from grpc import aio

from frontend.api import validation
from frontend.api.sampling_checks import check_resume, check_sampling
from frontend.callers.call import CALL, Work
from frontend.callers.tenants import engine_salt
from frontend.engines.pool import Engines
from frontend.generation import Generation, begin
from frontend.request import GenerationRequest
from frontend.text.model_files import ModelFacts
from frontend.text.tokenizer import Tokenizer
from nano_vllm_grpc.pb import frontend_pb2 as pb
from shared.errors import InvalidArgumentError

Context = aio.ServicerContext[Any, Any]


class Generations:
    """Starts generations with one model, for both interfaces of the frontend."""

    def __init__(self, facts: ModelFacts, tokenizer: Tokenizer, engines: Engines) -> None:
        self.facts = facts
        self.tokenizer = tokenizer
        self.engines = engines

    async def start(
        self,
        message: pb.GenerateRequest,
        context: Context,
        *,
        truncate: int | None = None,
        with_text: bool = True,
    ) -> Generation:
        """Checks a request and submits it. If the call ends first, the request is dropped.

        Args:
            truncate: how many of the prompt's last tokens to keep; -1 keeps as many as fit.
            with_text: whether the caller reads the deltas' text.

        Raises:
            InvalidArgumentError: a field is wrong.
            QueueFullError: too many requests wait for an engine that recovers.
            UnavailableError: no engine is ready or recovers.
        """
        received_at = time.monotonic()
        timeout_s = context.time_remaining()
        deadline = None if timeout_s is None else received_at + timeout_s
        checked = await self._checked(message, deadline, truncate)
        special = checked.sampling.show_special
        vocabulary = self.tokenizer.vocabulary if special else self.tokenizer.text_vocabulary
        generation = await begin(
            checked,
            self.engines,
            vocabulary,
            received_at,
            self.tokenizer.on_thread,
            with_text=with_text,
        )

        def on_done(_: object) -> None:
            # Runs however the call ends, even if the client goes away while a chunk is written.
            generation.close()

        context.add_done_callback(on_done)  # type: ignore[arg-type]  # grpc's stubs want a class
        if call := CALL.get():
            call.work = lambda: _work(generation, self.facts.name)
        return generation

    async def encode(
        self, message: pb.GenerateRequest | pb.TokenizeRequest, max_tokens: int
    ) -> list[int]:
        """The token ids of a message's text or chat.

        Raises:
            InvalidArgumentError: the prompt is missing, not acceptable or above `max_tokens`.
        """
        if message.HasField("text"):
            return await self.tokenizer.encode_text(message.text, max_tokens)
        if message.HasField("chat"):
            validation.check_chat(message.chat)
            return await self.tokenizer.encode_chat(message.chat, max_tokens)
        raise InvalidArgumentError("prompt", "missing; must be text, token_ids or chat")

    async def _checked(
        self, message: pb.GenerateRequest, deadline: float | None, truncate: int | None
    ) -> GenerationRequest:
        """Turns a message into a checked, tokenized request."""
        validation.check_request(message)
        call = CALL.get()
        client = call.client if call else None
        if client is not None:
            validation.check_priority(message.priority, client.priorities)
        request_id = message.request_id or uuid.uuid4().hex
        structlog.contextvars.bind_contextvars(request_id=request_id)
        info = self.engines.limits
        keep = None
        if truncate is not None:
            keep = validation.check_truncation(
                truncate, message.sampling.max_tokens, info.max_model_len
            )
        prompt_ids = await self._prompt_ids(message, info.max_model_len, info.vocab_size, keep)
        room = info.max_model_len - len(prompt_ids)
        sampling = check_sampling(message.sampling, self.facts, room, info.vocab_size)
        return GenerationRequest(
            request_id,
            prompt_ids,
            sampling,
            deadline,
            message.priority,
            engine_salt(client, message.cache_salt),
            check_resume(message.resume_token_ids, sampling, info.vocab_size),
            client,
            message.engine,
        )

    async def _prompt_ids(
        self, message: pb.GenerateRequest, max_model_len: int, vocab_size: int, keep: int | None
    ) -> Sequence[int]:
        field = message.WhichOneof("prompt") or "prompt"
        ids: Sequence[int]
        if field == "token_ids":
            ids = message.token_ids.ids
        else:
            limit = max_model_len - 1 if keep is None else validation.MAX_TOKENIZED
            ids = await self.encode(message, limit)
        if keep is not None:
            ids = ids[-keep:]
        validation.check_prompt_length(field, len(ids), max_model_len)
        # Copied, because the field keeps the whole message alive and is slow to iterate over.
        prompt_ids = array("I", ids)
        validation.check_token_ids(field, prompt_ids, vocab_size)
        return prompt_ids


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
