"""OpenAI's completions of texts: `POST /v1/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, closing
from typing import Annotated, Any

from pydantic import Field

from frontend.generation import CompletionReader, Generation
from frontend.http.answers import TextPlace
from frontend.http.chunks import ChunkedAnswer, Json
from frontend.http.errors import ParameterError
from frontend.http.exchange import Answer, Request
from frontend.http.parameters import (
    CompletionFields,
    Int32,
    Items,
    TokenId,
    generate_request,
)
from frontend.http.service import Service
from frontend.logprobs import LogprobRow
from frontend.text.completion import Delta
from nano_vllm_grpc.pb import frontend_pb2 as pb

MAX_PROMPTS = 128  # of a request


class CompletionBody(CompletionFields):
    """The parameters of completions."""

    prompt: str | Items[TokenId] | Items[str] | Items[Items[TokenId]]
    max_tokens: Int32 | None = None  # 0 with echo: only the prompt
    logprobs: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    echo: bool | None = None


async def create(service: Service, request: Request) -> Answer:
    """Completes one or more prompts."""
    body = service.read(CompletionBody, request)
    prompts = _prompts(body)
    message = generate_request(body)
    sampling = message.sampling
    # The default of OpenAI's API is not what fits the model.
    max_tokens = 16 if body.max_tokens is None else body.max_tokens
    sampling.max_tokens = 1 if body.echo and max_tokens == 0 else max_tokens
    if body.logprobs is not None:
        sampling.logprobs = body.logprobs
        if body.echo and body.prompt_logprobs is None:
            sampling.prompt_logprobs = body.logprobs
    if body.resume_token_ids and len(prompts) > 1:
        raise ParameterError("resume_token_ids", "requires a single prompt")
    message.request_id = request.request_id
    with ExitStack() as started:
        generations = []
        for prompt in prompts:
            each = _message(message, prompt)
            generation = await service.generations.start(each, truncate=body.truncate_prompt_tokens)
            generations.append(started.enter_context(closing(generation)))
        started.pop_all()
    texts = prompts if isinstance(prompts[0], str) else [None] * len(prompts)
    return await _Completions(service, body, generations, texts).answer()


def _prompts(body: CompletionBody) -> Sequence[Any]:
    prompt = body.prompt
    prompts: Sequence[Any] = (
        [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
    )
    if not 0 < len(prompts) <= MAX_PROMPTS:
        raise ParameterError("prompt", f"{len(prompts)} prompts; must be 1 to {MAX_PROMPTS}")
    return prompts


def _message(message: pb.GenerateRequest, prompt: Any) -> pb.GenerateRequest:
    found = pb.GenerateRequest()
    found.CopyFrom(message)
    if isinstance(prompt, str):
        found.text = prompt
    else:
        found.token_ids.ids.extend(prompt)
    return found


class _Completions(ChunkedAnswer):
    """Writes the completions of some prompts. Choice i * n + k is completion k of prompt i."""

    kind = chunk_kind = "text_completion"
    prefix, text_key = "cmpl", "text"

    def __init__(
        self,
        service: Service,
        body: CompletionBody,
        generations: Sequence[Generation],
        prompts: Sequence[str | None],
    ) -> None:
        """`prompts`: their texts, if they are known."""
        super().__init__(service, body, generations)
        self._echo = bool(body.echo)
        self._logprobs = body.logprobs
        self._only_prompt = self._echo and body.max_tokens == 0
        self._prompts = [*prompts]
        self._scored: dict[int, Sequence[LogprobRow]] = {}  # the rows of each prompt
        vocabulary = service.generations.vocabulary_of(generations[0].request)
        self._places = [TextPlace(vocabulary) for _ in range(self.num_choices)]

    async def choices(self) -> AsyncIterator[tuple[Json, Json]]:
        if len(self.generations) == 1:
            (generation,) = self.generations
            while not generation.ended:
                for reader, delta in await generation.next_deltas():
                    yield await self._chunk(0, reader, delta)
            return
        waiting: dict[asyncio.Task[list[tuple[CompletionReader, Delta]]], int] = {}
        for number, generation in enumerate(self.generations):
            waiting[asyncio.create_task(generation.next_deltas())] = number
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    number = waiting.pop(task)
                    for reader, delta in await task:
                        yield await self._chunk(number, reader, delta)
                    generation = self.generations[number]
                    if not generation.ended:
                        waiting[asyncio.create_task(generation.next_deltas())] = number
        finally:
            for task in waiting:
                task.cancel()

    async def _chunk(
        self, number: int, reader: CompletionReader, delta: Delta
    ) -> tuple[Json, Json]:
        request = self.generations[number].request
        text, rows = delta.text, list(delta.logprobs)
        if self._only_prompt:
            text, rows, delta.token_ids = "", [], []
        if self._echo and delta.offset == len(request.resume_token_ids):
            text = await self._prompt_text(number) + text
            if delta.prompt_logprobs:  # with the first choice's first tokens
                self._scored[number] = [([request.prompt_ids[0]], []), *delta.prompt_logprobs[1:]]
            if self._logprobs is not None:
                rows = [*self._scored[number], *rows]
        index = number * request.sampling.num_completions + reader.index
        found = self.choice(index, reader, delta) | {"text": text}
        if self._logprobs is not None:
            found["logprobs"] = self.texts.columns(rows, self._places[index])
        # Each choice has its own prompt.
        return found | await self.of_prompt(reader, delta, number), {}

    async def _prompt_text(self, number: int) -> str:
        if (text := self._prompts[number]) is None:
            ids = self.generations[number].request.prompt_ids
            text = self._prompts[number] = await self.tokenizer.decode(ids)
        return text

    def joined(self, chunks: Sequence[Json]) -> Json:
        return {"text": "".join(chunk.pop("text") for chunk in chunks)}

    def usage(self) -> Json:
        found = super().usage()
        if self._only_prompt:
            found |= {"completion_tokens": 0, "total_tokens": found["prompt_tokens"]}
        return found
