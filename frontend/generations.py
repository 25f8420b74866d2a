"""Starts generations: checks a request, tokenizes its prompt and submits it to the engines."""

from __future__ import annotations

import time
import uuid
from array import array
from collections.abc import Sequence
from dataclasses import replace

import structlog

from frontend import validation
from frontend.callers.call import CALL, Work
from frontend.callers.tenants import engine_salt
from frontend.engines.pool import Engines
from frontend.engines.token_stream import TokenStream, Waiter, WakeUps
from frontend.generation import CompletionReader, Generation, end_of_resumed, replay
from frontend.request import GenerationRequest
from frontend.sampling_checks import check_resume, check_sampling
from frontend.text.completion import CompletionBuilder
from frontend.text.model_files import ModelFacts
from frontend.text.tokenizer import Tokenizer
from nano_vllm_grpc.pb import frontend_pb2 as pb
from shared.errors import InvalidArgumentError
from shared.vocabulary import Vocabulary


class Generations:
    """Starts generations with one model, for clients of gRPC and of HTTP."""

    def __init__(self, facts: ModelFacts, tokenizer: Tokenizer, engines: Engines) -> None:
        self.facts = facts
        self.tokenizer = tokenizer
        self.engines = engines

    async def start(
        self,
        message: pb.GenerateRequest,
        timeout_s: float | None = None,
        truncate: int | None = None,
    ) -> Generation:
        """Checks a request and submits it. The caller must close the generation however its call
        ends.

        Args:
            timeout_s: after this time the request fails; None: never.
            truncate: how many of the prompt's last tokens to keep; -1 keeps as many as fit.

        Raises:
            InvalidArgumentError: a field is wrong.
            QueueFullError: too many requests wait for an engine that recovers.
            UnavailableError: no engine is ready or recovers.
        """
        received_at = time.monotonic()
        deadline = None if timeout_s is None else received_at + timeout_s
        return await self.begin(await self.check(message, deadline, truncate), received_at)

    async def begin(self, request: GenerationRequest, received_at: float) -> Generation:
        """Submits a checked request, unless the tokens to resume after already complete it.

        Raises:
            QueueFullError, UnavailableError: as for `start`.
        """
        sampling, vocabulary = request.sampling, self.vocabulary_of(request)
        builders = [
            CompletionBuilder(vocabulary, sampling) for _ in range(sampling.num_completions)
        ]
        text = ""
        if tokens := request.resume_token_ids:
            text = await self.tokenizer.on_thread(lambda: replay(tokens, builders[0]))
        reason = end_of_resumed(request, builders[0])
        if reason is None:
            streams = self.engines.submit(request)
        else:
            streams = [TokenStream(0, request, Waiter(WakeUps()))]
            streams[0].complete(reason)
        readers = [CompletionReader(*each) for each in zip(streams, builders, strict=True)]
        generation = Generation(request, readers, received_at, self.engines.metrics, text)
        if call := CALL.get():
            call.works.append(lambda: _work(generation, self.facts.name))
        return generation

    def vocabulary_of(self, request: GenerationRequest) -> Vocabulary:
        """The bytes that each token has in the text of a request's completions."""
        special = request.sampling.show_special
        return self.tokenizer.vocabulary if special else self.tokenizer.text_vocabulary

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

    async def check(
        self, message: pb.GenerateRequest, deadline: float | None, truncate: int | None
    ) -> GenerationRequest:
        """Turns a message into a checked, tokenized request.

        Raises:
            InvalidArgumentError: a field is wrong.
            UnavailableError: no engine is connected or recovers.
        """
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
        if message.sampling.bad_words:
            words = await self._token_ids_of(message.sampling.bad_words, info.vocab_size)
            sampling = replace(sampling, bad_words=words)
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
            may_store=message.store or not message.HasField("store"),
        )

    async def _token_ids_of(
        self, words: Sequence[str], vocab_size: int
    ) -> tuple[tuple[int, ...], ...]:
        """The token ids of words at the beginning of a text, and of words after a space."""
        texts = [space + (word.lstrip() or word) for word in words for space in ("", " ")]
        found = {tuple(ids) for ids in await self.tokenizer.encode_words(texts)}
        return tuple(sorted(ids for ids in found if ids and max(ids) < vocab_size))

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
