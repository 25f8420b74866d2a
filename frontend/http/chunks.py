"""Answers that are made of chunks, as OpenAI's completions of chats and texts are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, closing
from typing import Any

import orjson

from frontend.generation import REASONS, CompletionReader, Generation
from frontend.http.answers import TokenTexts, usage
from frontend.http.parameters import CompletionFields, StreamOptions
from frontend.http.service import Service, now
from frontend.text.completion import Delta

Json = dict[str, Any]


class ChunkedAnswer(ABC):
    """Writes an answer as a stream of chunks, or joins the chunks."""

    kind: str  # the name of the API's object
    chunk_kind: str  # the name of a part of it
    prefix: str  # of its id
    text_key: str  # what shows the text in a chunk's choice

    def __init__(
        self, service: Service, body: CompletionFields, generations: Sequence[Generation]
    ) -> None:
        """`generations`: one per prompt, each with as many completions."""
        self.service = service
        self.body = body
        self.generations = generations
        self.num_choices = len(generations) * generations[0].request.sampling.num_completions
        self.tokenizer = service.generations.tokenizer
        self.texts = TokenTexts(
            service.generations,
            generations[0].request,
            as_ids=bool(body.return_tokens_as_token_ids),
        )
        self._about = {
            "id": f"{self.prefix}-{generations[0].request.request_id}",
            "object": self.kind,
            "created": now(),
            "model": service.model,
        }

    @abstractmethod
    def choices(self) -> AsyncIterator[tuple[Json, Json]]:
        """Yields a chunk's choice, and its parts about the prompt, whenever there is news."""

    @abstractmethod
    def joined(self, chunks: Sequence[Json]) -> Json:
        """The text, or the message, of a whole choice."""

    def usage(self) -> Json:
        totals = [generation.totals() for generation in self.generations]
        return usage(totals, reports_cached=self.service.reports_cached)

    async def answer(self) -> AsyncIterator[bytes] | bytes:
        return self._stream() if self.body.stream else await self._whole()

    async def _stream(self) -> AsyncIterator[bytes]:
        options = self.body.stream_options or StreamOptions()
        about = self._about | {"object": self.chunk_kind}
        head = b"data: %s," % orjson.dumps(about)[:-1]  # written once
        async for choice, rest in self._choices():
            is_shown = rest or any(choice.get(key) for key in (self.text_key, *_SHOWN))
            if options.continuous_usage_stats:
                rest["usage"] = self.usage()
            elif options.include_usage:
                rest["usage"] = None
            if is_shown:
                yield b"%s%s\n\n" % (head, orjson.dumps({"choices": [choice], **rest})[1:])
        if options.include_usage:
            yield b"%s%s\n\n" % (head, orjson.dumps({"choices": [], "usage": self.usage()})[1:])
        yield b"data: [DONE]\n\n"

    async def _whole(self) -> bytes:
        chunks: list[list[Json]] = [[] for _ in range(self.num_choices)]
        about: Json = {}
        async for choice, rest in self._choices():
            chunks[choice["index"]].append(choice)
            about |= rest
        choices = [self.joined(each) | _join(each) for each in chunks]
        return orjson.dumps(self._about | {"choices": choices, "usage": self.usage()} | about)

    async def _choices(self) -> AsyncIterator[tuple[Json, Json]]:
        with ExitStack() as open_:
            for generation in self.generations:
                open_.enter_context(closing(generation))
            async for chunk in self.choices():
                yield chunk

    def choice(self, index: int, completion: CompletionReader, delta: Delta) -> Json:
        """A chunk's choice without its text."""
        ending = completion.ending
        found: Json = {
            "index": index,
            "logprobs": None,
            "finish_reason": REASONS[ending.reason] if ending else None,
            "stop_reason": ending.stop_reason if ending else None,
        }
        if self.body.return_token_ids:
            found["token_ids"] = delta.token_ids
        return found

    async def of_prompt(self, completion: CompletionReader, delta: Delta, number: int) -> Json:
        """Returns the parts of a chunk about prompt `number`, which only its first chunk has."""
        found: Json = {}
        request = self.generations[number].request
        if delta.prompt_logprobs:
            rows, delta.prompt_logprobs = delta.prompt_logprobs, ()
            rows_json = self.tokenizer.on_thread(lambda: self.texts.prompt_rows(rows))
            found["prompt_logprobs"] = await rows_json
        first = completion.index == 0 and delta.offset == len(request.resume_token_ids)
        if self.body.return_token_ids and first and delta.token_ids:
            found["prompt_token_ids"] = list(request.prompt_ids)
        return found


# What makes a chunk worth sending, besides its text.
_SHOWN = ("logprobs", "finish_reason", "token_ids", "prompt_logprobs")


def _join(chunks: Sequence[Json]) -> Json:
    """A whole choice without its text."""
    whole = chunks[0] | chunks[-1]
    scored = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
    if scored:
        whole["logprobs"] = {key: _concatenated(scored, key) for key in scored[0]}
    if "token_ids" in whole:
        whole["token_ids"] = _concatenated(chunks, "token_ids")
    return whole


def _concatenated(parts: Sequence[Json], key: str) -> list[Any]:
    return [each for part in parts for each in part[key]]
