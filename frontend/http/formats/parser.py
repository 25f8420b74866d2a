"""Splits an answer into content, reasoning and tool calls, as it arrives."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Literal

from frontend.http.formats.reader import NEWLINES, SCALAR, SEPARATORS, SPACE, SPACES, Reader, Steps
from frontend.http.formats.tool_format import (
    CALL_BEGIN,
    CALL_END,
    CALLS_BEGIN,
    CALLS_END,
    MISTRAL_ARGUMENTS,
    MISTRAL_CALLS,
    MISTRAL_ID,
    NAME_END,
    PHI_BEGIN,
    PHI_END,
    PYTHON_TAG,
    ToolFormat,
)


@dataclass(frozen=True, slots=True)
class Content:
    """The next part of the visible answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The next part of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The beginning of the next tool call."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next part of the last call's arguments, which are JSON as the model wrote it."""

    text: str


Event = Content | Reasoning | CallBegin | CallArguments
ReasoningStart = Literal["none", "may_begin", "begun"]

_NAME = re.compile(r"[^\n<]*")  # of a function, in DeepSeek's format
_MISTRAL_NAME = re.compile(r"[^\n\[{]*")


class _Trimmed:
    """Passes text on, but for `characters` at its end, which it holds until more follows."""

    def __init__(self, characters: str, out: Callable[[str], None]) -> None:
        self._characters = characters
        self._out = out
        self._held: list[str] = []
        self._dropped = False  # whether nothing was passed on since `drop`

    def write(self, text: str) -> None:
        if kept := text.rstrip(self._characters):
            self._out("".join([*self._held, kept]))
            self._held.clear()
            self._dropped = False
        self._held.append(text[len(kept) :])

    def drop(self) -> None:
        self._held.clear()
        self._dropped = True

    def end(self) -> None:
        """Passes on the end of the text, unless it follows directly on what was dropped."""
        if not self._dropped:
            self._out("".join(self._held))


@dataclass(slots=True)
class _Call:
    """A call that is being read.

    Args:
        arguments: those that cannot be passed on yet.
        is_object: whether they were written as an object.
        begun: whether the call is certain, and in the events.
    """

    name: str = ""
    arguments: str = ""
    is_object: bool = False
    begun: bool = False


class AnswerParser:
    """Splits an answer into events.

    Whitespace around calls is dropped. A call begins once its name and the first character of its
    arguments are known. If the text is malformed or ends before that, it is content as it was
    written. Later than that, the call remains as far as it was written.
    """

    def __init__(self, *, reasoning: ReasoningStart, tools: ToolFormat | None) -> None:
        """
        Args:
            reasoning: begun: the prompt ends with <think>; may_begin: the answer may begin with it.
            tools: the format of calls; None: everything but reasoning is content.
        """
        self._events: list[tuple[type[Event], str]] = []
        self._content = _Trimmed(SPACE if tools else "", partial(self._emit, Content))
        # Text that was read, and that is content unless it turns out to be a call.
        self._held: list[str] = []
        self._reader = Reader(self._held.append)
        self._steps = self._answer(reasoning, tools)

    def feed(self, text: str) -> list[Event]:
        """Takes the next piece of the answer, and returns what became certain."""
        self._reader.add(text)
        next(self._steps, None)
        return self._take_events()

    def finish(self) -> list[Event]:
        """Returns the last events. Call it once, after the last piece."""
        self._reader.end()
        next(self._steps, None)
        return self._take_events()

    def _emit(self, kind: type[Event], text: str) -> None:
        if text:
            self._events.append((kind, text))

    def _take_events(self) -> list[Event]:
        taken: list[Event] = []
        for kind, group in groupby(self._events, lambda event: event[0]):
            texts = [text for _, text in group]
            taken += map(kind, texts if kind is CallBegin else ["".join(texts)])
        self._events.clear()
        return taken

    def _hold(self) -> None:
        """Drops the text that is held, and holds the text that is read from here on."""
        self._held.clear()
        self._reader.out = self._held.append

    def _until(self, mark: str) -> Steps[bool]:
        """Makes the text that is held content, and all text up to the next mark of calls. Returns
        whether there is a mark, which is then held."""
        self._content.write("".join(self._held))
        self._reader.out = self._content.write
        yield from self._reader.until(mark)
        self._hold()
        return (yield from self._reader.skip(mark))

    def _answer(self, reasoning: ReasoningStart, tools: ToolFormat | None) -> Steps[None]:
        if reasoning != "none":
            yield from self._reason(begun=reasoning == "begun")
        match tools:
            case ToolFormat.HERMES:
                yield from self._enclosed("<tool_call>", "</tool_call>")
            case ToolFormat.PHI:
                yield from self._enclosed(PHI_BEGIN, PHI_END)
            case ToolFormat.MISTRAL | ToolFormat.MISTRAL_11:
                yield from self._mistral()
            case ToolFormat.LLAMA:
                yield from self._llama()
            case ToolFormat.DEEPSEEK:
                yield from self._deepseek()
            case None:
                self._content.write("".join(self._held))
                self._reader.out = self._content.write
                yield from self._reader.rest()
        self._content.end()

    def _reason(self, *, begun: bool) -> Steps[None]:
        """Reads the reasoning, if there is any. Text that is held then is content."""
        reader, reasoning = self._reader, _Trimmed("\n", partial(self._emit, Reasoning))
        yield from reader.run(SPACES)
        if (yield from reader.skip("<think>")):
            yield from reader.run(NEWLINES)
        elif begun:
            reasoning.write("".join(self._held).lstrip("\n"))
        else:
            return
        reader.out = reasoning.write
        yield from reader.until("</think>")
        self._hold()
        if (yield from reader.skip("</think>")):
            yield from reader.run(NEWLINES)
            self._hold()
        else:
            reasoning.end()

    def _enclosed(self, begin: str, end: str) -> Steps[None]:
        """Reads calls between two marks: one, several, or a list of them."""
        while (yield from self._until(begin)):
            yield from self._reader.run(SPACES)
            yield from self._json_calls(end)

    def _json_calls(self, end: str) -> Steps[None]:
        """Reads calls that are JSON objects, up to a mark, or without one up to a list's end."""
        reader = self._reader
        listed = yield from reader.skip("[")
        yield from reader.run(SPACES)
        while (yield from self._json_call()):
            yield from reader.run(SEPARATORS)
            if listed and (yield from reader.skip("]")):
                listed = False
                self._hold()
                if not end:
                    break
                yield from reader.run(SPACES)
            if end and (yield from reader.skip(end)):
                self._hold()
                break

    def _mistral(self) -> Steps[None]:
        """Reads a list of calls after a mark, or calls that each have a mark, a name and arguments
        (since version 11 of the tokenizer)."""
        reader = self._reader
        while (yield from self._until(MISTRAL_CALLS)):
            yield from reader.run(SPACES)
            if (yield from reader.peek()) in ("[", "{"):
                yield from self._json_calls("")
                continue
            call = _Call((yield from reader.run(_MISTRAL_NAME)).strip(SPACE))
            if (yield from reader.skip(MISTRAL_ID)):
                yield from reader.run(_MISTRAL_NAME)
            yield from reader.skip(MISTRAL_ARGUMENTS)
            yield from reader.run(SPACES)
            if call.name and (yield from reader.peek()) == "{":
                yield from self._arguments(call)

    def _llama(self) -> Steps[None]:
        """Reads calls at the beginning of the content, or after a mark."""
        reader = self._reader
        before = SPACES
        while True:
            yield from reader.run(before)
            if (yield from reader.skip(PYTHON_TAG)):
                yield from reader.run(SPACES)
            if (yield from self._json_call()):
                before = SEPARATORS
                continue
            if reader.at_end:
                # A mark alone is no content.
                rest = "".join(self._held).replace(PYTHON_TAG, "")
                if not rest.strip(SPACE):
                    self._held[:] = [rest]
            if not (yield from self._until(PYTHON_TAG)):
                return
            before = SPACES

    def _deepseek(self) -> Steps[None]:
        """Reads calls between marks. One pair encloses all calls, another each of them."""
        reader = self._reader
        while (yield from self._until(CALLS_BEGIN)):
            yield from reader.run(SPACES)
            called = False
            while (yield from reader.skip(CALL_BEGIN)):
                called = yield from self._deepseek_call()
                if not called:
                    break
                yield from reader.run(SPACES)
            if called and (yield from reader.skip(CALLS_END)):
                self._hold()

    def _deepseek_call(self) -> Steps[bool]:
        """Reads `function<sep>NAME`, a line end and the arguments in a fence, or `NAME<sep>` and
        the arguments (since V3.1). Returns whether a call has begun."""
        reader = self._reader
        call = _Call((yield from reader.run(_NAME)).strip(SPACE))
        if not (yield from reader.skip(NAME_END)):
            return False
        yield from reader.run(SPACES)
        fenced = (yield from reader.peek()) != "{"
        if fenced:
            if call.name != "function":
                return False
            call.name = (yield from reader.run(_NAME)).strip(SPACE)
            yield from reader.run(SPACES)
            if not (yield from reader.skip("```json")):
                return False
            yield from reader.run(SPACES)
        if not call.name or (yield from reader.peek()) != "{":
            return False
        yield from self._arguments(call)
        yield from reader.run(SPACES)
        if fenced and (yield from reader.skip("```")):
            self._hold()
            yield from reader.run(SPACES)
        if (yield from reader.skip(CALL_END)):
            self._hold()
        return True

    def _json_call(self) -> Steps[bool]:
        """Reads a call that is a JSON object, if one comes next. Returns whether a call has begun.

        Text that is held then is no part of the call."""
        reader, call = self._reader, _Call()
        more = yield from reader.skip("{")
        while more and (yield from self._member(call)):
            yield from reader.run(SPACES)
            if (yield from reader.skip("}")):
                if call.name and not call.begun:
                    self._begin(call, call.arguments or "{}")
                if call.begun:
                    self._hold()
                return call.begun
            more = yield from reader.skip(",")
        if call.begun and reader.at_end:
            self._hold()
        return call.begun

    def _member(self, call: _Call) -> Steps[bool]:
        """Reads a key and its value. Returns whether both are right."""
        reader = self._reader
        yield from reader.run(SPACES)
        key = _decoded((yield from reader.string()))
        if key is None:
            return False
        yield from reader.run(SPACES)
        if not (yield from reader.skip(":")):
            return False
        yield from reader.run(SPACES)
        if key == "name" and not call.name:
            call.name = _decoded((yield from reader.string())) or ""
            if call.name and call.is_object:
                self._begin(call, call.arguments)
            return bool(call.name)
        if key in ("arguments", "parameters") and not (call.begun or call.arguments):
            return (yield from self._arguments(call))
        return (yield from reader.value())

    def _arguments(self, call: _Call) -> Steps[bool]:
        """Reads arguments: an object, or a string that holds one, or null."""
        reader = self._reader
        first = yield from reader.peek()
        if first == "{":
            num_held = len(self._held)
            if call.name:
                self._begin(call)
                reader.out = partial(self._emit, CallArguments)
            closed = yield from reader.nested()
            if call.begun:
                self._hold()
            else:
                call.is_object = True
                call.arguments = "".join(self._held[num_held:])
            return closed
        if first == '"':
            text = _decoded((yield from reader.string()))
            call.arguments = text or "{}"
            return text is not None
        return first == "n" and (yield from reader.run(SCALAR)) == "null"

    def _begin(self, call: _Call, arguments: str = "") -> None:
        """Makes a call certain: emits it, and drops its syntax and the whitespace before it."""
        call.begun = True
        self._content.drop()
        self._hold()
        self._emit(CallBegin, call.name)
        self._emit(CallArguments, arguments)


def _decoded(text: str) -> str | None:
    """The value of a JSON string; None if the text is not one, or UTF-8 lacks a character of it."""
    try:
        value: str = json.loads(text)
        value.encode()
    except ValueError:
        return None
    return value
