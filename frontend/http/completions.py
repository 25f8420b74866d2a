"""OpenAI's completions of texts: `POST /v1/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, closing
from typing import Annotated, Any

import orjson
from pydantic import Field

from frontend.generation import CompletionReader, Generation
from frontend.http.answers import TokenTexts, finish_reason, usage
from frontend.http.exchange import Answer, Request
from frontend.http.parameters import (
    Int32,
    Items,
    SamplingFields,
    StreamOptions,
    TokenId,
    generate_request,
    read_body,
)
from frontend.http.service import Service, now
from frontend.text.completion import Delta
from nano_vllm_grpc.pb import frontend_pb2 as pb
from shared.errors import InvalidArgumentError

MAX_PROMPTS = 128  # of a request

Prompt = str | Items[TokenId]


class CompletionBody(SamplingFields):
    """The parameters of completions."""

    prompt: str | Items[TokenId] | Items[str] | Items[Items[TokenId]]
    model: str | None = None
    max_tokens: Int32 | None = None  # 0 with echo: only the prompt
    logprobs: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    echo: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


async def create(service: Service, request: Request) -> Answer:
    """Completes one or more prompts.

    Raises:
        ServiceError: a parameter is wrong, or the request failed.
    """
    body = read_body(CompletionBody, request.body)
    service.check_model(body.model)
    prompts = _prompts(body)
    message = await generate_request(body, service.generations.tokenizer)
    sampling = message.sampling
    # OpenAI's default; a completion of what fits the model would surprise.
    max_tokens = 16 if body.max_tokens is None else body.max_tokens
    sampling.max_tokens = max(max_tokens, 1) if body.echo else max_tokens
    if body.logprobs is not None:
        sampling.logprobs = body.logprobs
        if body.echo:
            sampling.prompt_logprobs = body.logprobs
    if body.resume_token_ids and len(prompts) > 1:
        raise InvalidArgumentError("resume_token_ids", "requires a single prompt")
    with ExitStack() as started:
        generations = []
        for index, prompt in enumerate(prompts):
            each = _message(message, prompt)
            if index or not message.request_id:
                each.request_id = ""
            if request.request_id and not index:
                each.request_id = request.request_id
            generation = await service.generations.start(each, truncate=body.truncate_prompt_tokens)
            generations.append(started.enter_context(closing(generation)))
        started.pop_all()
    texts = prompts if isinstance(prompts[0], str) else [None] * len(prompts)
    completions = _Completions(service, body, generations, texts)
    return completions.stream() if body.stream else await completions.whole()


def _prompts(body: CompletionBody) -> Sequence[Any]:
    prompt = body.prompt
    prompts: Sequence[Any] = (
        [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
    )
    if not 0 < len(prompts) <= MAX_PROMPTS:
        raise InvalidArgumentError("prompt", f"{len(prompts)} prompts; must be 1 to {MAX_PROMPTS}")
    return prompts


def _message(message: pb.GenerateRequest, prompt: Any) -> pb.GenerateRequest:
    found = pb.GenerateRequest()
    found.CopyFrom(message)
    if isinstance(prompt, str):
        found.text = prompt
    else:
        found.token_ids.ids.extend(prompt)
    return found


class _Completions:
    """Writes the completions of some prompts. Choice i * n + k is completion k of prompt i."""

    def __init__(
        self,
        service: Service,
        body: CompletionBody,
        generations: Sequence[Generation],
        prompts: Sequence[str | None],
    ) -> None:
        self._service = service
        self._body = body
        self._generations = generations
        self._prompts = [*prompts]
        self._n = generations[0].request.sampling.num_completions
        tokenizer = service.generations.tokenizer
        self._texts = TokenTexts(
            tokenizer.vocabulary.tokens, as_ids=bool(body.return_tokens_as_token_ids)
        )
        self._on_thread = tokenizer.on_thread
        self._offsets = [0] * (self._n * len(generations))  # characters of each choice so far
        self._only_prompt = bool(body.echo) and body.max_tokens == 0
        self._about = {
            "id": f"cmpl-{generations[0].request.request_id}",
            "object": "text_completion",
            "created": now(),
            "model": service.model,
        }

    async def whole(self) -> bytes:
        parts: list[list[dict[str, Any]]] = [[] for _ in self._offsets]
        async for chunk in self._chunks():
            parts[chunk["index"]].append(chunk)
        choices = [_joined(each) for each in parts]
        return orjson.dumps(self._about | {"choices": choices, "usage": self._usage()})

    async def stream(self) -> AsyncIterator[bytes]:
        options = self._body.stream_options or StreamOptions()
        head = b"data: %s," % orjson.dumps(self._about)[:-1]
        async for chunk in self._chunks():
            rest: dict[str, Any] = {"choices": [chunk]}
            if options.continuous_usage_stats:
                rest["usage"] = self._usage()
            elif options.include_usage:
                rest["usage"] = None
            if any(chunk.get(name) for name in _SHOWN):
                yield b"%s%s\n\n" % (head, orjson.dumps(rest)[1:])
        if options.include_usage:
            last = orjson.dumps({"choices": [], "usage": self._usage()})
            yield b"%s%s\n\n" % (head, last[1:])
        yield b"data: [DONE]\n\n"

    async def _chunks(self) -> AsyncIterator[dict[str, Any]]:
        """Yields the choices of chunks, each as soon as there is news of it."""
        with ExitStack() as open_:
            for generation in self._generations:
                open_.enter_context(closing(generation))
            if len(self._generations) == 1:
                while not self._generations[0].ended:
                    for reader, delta in await self._generations[0].next_deltas():
                        yield await self._chunk(0, reader, delta)
                return
            waiting: dict[asyncio.Task[Any], int] = {}
            open_.callback(lambda: [task.cancel() for task in waiting])
            for index, generation in enumerate(self._generations):
                waiting[asyncio.create_task(generation.next_deltas())] = index
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    index = waiting.pop(task)
                    for reader, delta in await task:
                        yield await self._chunk(index, reader, delta)
                    generation = self._generations[index]
                    if not generation.ended:
                        waiting[asyncio.create_task(generation.next_deltas())] = index

    async def _chunk(self, number: int, reader: CompletionReader, delta: Delta) -> dict[str, Any]:
        body, index = self._body, number * self._n + reader.index
        text, rows, token_ids = delta.text, list(delta.logprobs), delta.token_ids
        found: dict[str, Any] = {"index": index, "text": text, "logprobs": None}
        if self._only_prompt:
            text, rows, token_ids = "", [], []
        prompt_ids = self._generations[number].request.prompt_ids
        first = delta.offset == len(self._generations[number].request.resume_token_ids)
        if body.echo and first:
            text = await self._echoed(number) + text
        if delta.prompt_logprobs:
            scored, delta.prompt_logprobs = delta.prompt_logprobs, ()
            found["prompt_logprobs"] = await self._on_thread(
                lambda: self._texts.prompt_rows(scored)
            )
            if body.echo and body.logprobs is not None:
                rows = [([prompt_ids[0]], []), *scored[1:], *rows]
        if body.logprobs is not None:
            found["logprobs"] = self._texts.columns(rows, self._offsets[index])
        if body.return_token_ids:
            found["token_ids"] = token_ids
            if first and reader.index == 0:
                found["prompt_token_ids"] = list(prompt_ids)
        self._offsets[index] += len(text)
        ending = reader.ending
        found |= {
            "text": text,
            "finish_reason": finish_reason(reader),
            "stop_reason": ending.stop_reason if ending else None,
        }
        return found

    async def _echoed(self, number: int) -> str:
        """The text of a prompt."""
        if (text := self._prompts[number]) is None:
            ids = self._generations[number].request.prompt_ids
            text = self._prompts[number] = await self._service.generations.tokenizer.decode(ids)
        return text

    def _usage(self) -> dict[str, Any]:
        totals = [generation.totals() for generation in self._generations]
        found = usage(totals, reports_cached=self._service.reports_cached)
        if self._only_prompt:
            found |= {"completion_tokens": 0, "total_tokens": found["prompt_tokens"]}
        return found


# The parts of a chunk without which there is no chunk.
_SHOWN = ("text", "finish_reason", "token_ids", "logprobs")


def _joined(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A whole choice, made of its chunks."""
    whole = chunks[0] | chunks[-1] | {"text": "".join(chunk["text"] for chunk in chunks)}
    if whole["logprobs"] is not None:
        whole["logprobs"] = {
            name: [each for chunk in chunks for each in chunk["logprobs"][name]]
            for name in whole["logprobs"]
        }
    if "token_ids" in whole:
        whole["token_ids"] = [each for chunk in chunks for each in chunk["token_ids"]]
    return whole
