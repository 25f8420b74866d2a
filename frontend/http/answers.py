"""Answers of the model, split into content, reasoning and tool calls, with their statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from frontend.generation import CompletionReader, Generation, Totals
from frontend.generations import Generations
from frontend.http.formats.parser import AnswerParser, Event, ReasoningStart
from frontend.http.formats.tool_format import ToolFormat, reasons
from frontend.logprobs import LogprobRow
from frontend.request import GenerationRequest
from frontend.text.completion import Delta
from frontend.text.detokenizer import IncrementalDetokenizer
from frontend.text.threads import in_pieces
from shared.vocabulary import Vocabulary

_TAIL = 16  # tokens of a prompt in which a template may open a thought
_ROWS_AT_ONCE = 32
_MIN_LOGPROB = -9999.0  # as vLLM writes minus infinity, which JSON lacks


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """How the text of an answer is read."""

    reasoning: ReasoningStart = "none"
    tools: ToolFormat | None = None


def answer_form(
    generations: Generations, request: GenerationRequest, tools: ToolFormat | None
) -> AnswerForm:
    """How the answer to a chat is read. Only models whose template has thoughts reason.

    Args:
        tools: the format of calls; None if they are not read.
    """
    if not reasons(generations.tokenizer.chat_template):
        return AnswerForm("none", tools)
    table = generations.tokenizer.vocabulary.tokens
    tail = b"".join(table.get(token_id, b"") for token_id in request.prompt_ids[-_TAIL:])
    # A grammar begins with the first token, so the thought has not begun.
    begun = tail.rstrip().endswith(b"<think>") and request.sampling.grammar is None
    return AnswerForm("begun" if begun else "may_begin", tools)


class Step(NamedTuple):
    """News of one completion."""

    completion: CompletionReader
    delta: Delta
    events: Sequence[Event]


class Answers:
    """Reads the completions of a generation."""

    def __init__(self, generation: Generation, form: AnswerForm) -> None:
        self.generation = generation
        count = generation.request.sampling.num_completions
        self._parsers = [
            AnswerParser(reasoning=form.reasoning, tools=form.tools) for _ in range(count)
        ]
        # Of the tokens that the client already has.
        self.resumed: Sequence[Event] = self._parsers[0].feed(generation.resumed_text)

    async def next(self) -> list[Step]:
        """Waits for news, as `Generation.next_deltas`.

        Raises:
            ServiceError: the request failed.
        """
        steps = []
        for completion, delta in await self.generation.next_deltas():
            parser = self._parsers[completion.index]
            events = parser.feed(delta.text) if delta.text else []
            if completion.ending is not None:
                events = [*events, *parser.finish()]
            steps.append(Step(completion, delta, events))
        return steps


def named_event(name: str, value: dict[str, Any]) -> bytes:
    """A server-sent event with a name."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), orjson.dumps(value))


def usage(totals: Sequence[Totals], *, reports_cached: bool) -> dict[str, Any]:
    """OpenAI's `usage` of one or more prompts."""
    prompt = sum(each.prompt_tokens for each in totals)
    completion = sum(each.completion_tokens for each in totals)
    cached = sum(each.cached_prompt_tokens for each in totals)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached} if reports_cached else None,
    }


class TextPlace:
    """A place between tokens. `offset`: the characters before it that are complete."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._detokenizer = IncrementalDetokenizer(vocabulary)
        self.offset = 0

    def pass_by(self, token_id: int) -> None:
        self.offset += len(self._detokenizer.feed([token_id]))


class TokenTexts:
    """Writes tokens in log-probabilities.

    Args:
        as_ids: whether to write `token_id:17`, which is unambiguous, instead of the text.
    """

    def __init__(
        self, generations: Generations, request: GenerationRequest, *, as_ids: bool = False
    ) -> None:
        self._table = generations.tokenizer.vocabulary.tokens
        self._shown = generations.vocabulary_of(request).tokens
        self._silent = request.sampling.silent_ids
        self._as_ids = as_ids

    def text(self, token_id: int) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        return self._table.get(token_id, b"").decode(errors="replace")

    def entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        """A token of OpenAI's chats. Its bytes are those that it has in the text."""
        shown = b"" if token_id in self._silent else self._shown.get(token_id, b"")
        return {
            "token": self.text(token_id),
            "logprob": _finite(logprob),
            "bytes": list(shown),
        }

    def chat_entries(self, rows: Sequence[LogprobRow]) -> list[dict[str, Any]]:
        """One entry per token, with the likeliest tokens there."""
        entries = []
        for ids, values in rows:
            first, *top = map(self.entry, ids, values)
            entries.append(first | {"top_logprobs": top})
        return entries

    def columns(self, rows: Sequence[LogprobRow], place: TextPlace) -> dict[str, list[Any]]:
        """The log-probabilities of OpenAI's completions.

        Args:
            rows: one per token; empty for a prompt's first token.
            place: of the first token in the text; it moves on.
        """
        found: dict[str, list[Any]] = {
            "text_offset": [],
            "token_logprobs": [],
            "tokens": [],
            "top_logprobs": [],
        }
        for ids, values in rows:
            token = self.text(ids[0])
            found["tokens"].append(token)
            found["text_offset"].append(place.offset)
            place.pass_by(ids[0])
            found["token_logprobs"].append(_finite(values[0]) if values else None)
            top = {self.text(i): _finite(v) for i, v in zip(ids[1:], values[1:], strict=True)}
            found["top_logprobs"].append((top | {token: _finite(values[0])}) if values else None)
        return found

    def prompt_rows(self, rows: Sequence[LogprobRow]) -> orjson.Fragment:
        """vLLM's `prompt_logprobs` as JSON: a map by token id for each token of the prompt. Run it
        on a thread, because a long prompt takes a second."""
        pieces = [
            orjson.dumps([self._prompt_row(row) for row in piece])[1:-1]
            for piece in in_pieces(rows, _ROWS_AT_ONCE)
        ]
        return orjson.Fragment(b"[" + b",".join(pieces) + b"]")

    def _prompt_row(self, row: LogprobRow) -> dict[str, Any] | None:
        ids, values = row
        ranks = {token_id: rank for rank, token_id in enumerate(ids[1:], start=1)}
        return {
            str(token_id): {
                "logprob": _finite(value),
                "rank": ranks.get(token_id),
                "decoded_token": self.text(token_id),
            }
            for token_id, value in zip(ids, values, strict=True)
        } or None


def _finite(logprob: float) -> float:
    return max(logprob, _MIN_LOGPROB)
