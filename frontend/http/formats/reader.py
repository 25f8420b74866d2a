"""Reads a text that arrives in pieces, and the JSON in it.

The readers are generators, which yield where they need more text to decide. Their results depend
on the text alone, never on how it was cut into pieces. A character is looked at a bounded
number of times, whatever the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

_T = TypeVar("_T")
Steps = Generator[None, None, _T]

SPACE = " \t\n\r"  # of JSON

# Characters that `Reader.run` reads.
SPACES = re.compile(f"[{SPACE}]*")
NEWLINES = re.compile("\n*")
SEPARATORS = re.compile(f"[{SPACE},;]*")
SCALAR = re.compile(r"[-+.\w]*")
_STRING = re.compile(r'[^"\\]*')

# The bracket that closes an object or an array, and the characters between brackets and strings.
_NESTED = {"{": ("}", re.compile('[^{}"]*')), "[": ("]", re.compile(r'[^\[\]"]*'))}


class Reader:
    """Reads a text that arrives in pieces, and hands the text that was read to `out`."""

    def __init__(self, out: Callable[[str], None]) -> None:
        self.out = out
        self._text = ""
        self._at = 0  # the text before this position was read
        self._ended = False

    def add(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        self._ended = True

    @property
    def at_end(self) -> bool:
        return self._ended and self._at == len(self._text)

    def _read(self, end: int) -> str:
        text = self._text[self._at : end]
        self._at = end
        self.out(text)
        return text

    def peek(self) -> Steps[str]:
        """Returns the next character; empty at the end."""
        while self._at == len(self._text) and not self._ended:
            yield
        return self._text[self._at : self._at + 1]

    def skip(self, mark: str) -> Steps[bool]:
        """Reads `mark` if it comes next, else nothing. Returns whether it did."""
        while True:
            rest = self._text[self._at : self._at + len(mark)]
            if len(rest) == len(mark) or not mark.startswith(rest) or self._ended:
                break
            yield
        if rest == mark:
            self._read(self._at + len(mark))
        return rest == mark

    def run(self, characters: re.Pattern[str]) -> Steps[str]:
        """Reads as many of the characters as follow, and returns them."""
        parts = []
        while True:
            match = characters.match(self._text, self._at)
            assert match  # also of no characters
            parts.append(self._read(match.end()))
            if self._at < len(self._text) or self._ended:
                return "".join(parts)
            yield

    def until(self, mark: str) -> Steps[None]:
        """Reads up to `mark`, or to the end."""
        while (found := self._text.find(mark, self._at)) < 0 and not self._ended:
            self._read(self._possible(mark))
            yield
        self._read(found if found >= 0 else len(self._text))

    def rest(self) -> Steps[None]:
        """Reads to the end."""
        while not self.at_end:
            self._read(len(self._text))
            yield

    def _possible(self, mark: str) -> int:
        """Where the end of the text may begin `mark`; the text's length if nowhere."""
        begin = max(self._at, len(self._text) - len(mark) + 1)
        while (begin := self._text.find(mark[0], begin)) >= 0:
            if mark.startswith(self._text[begin:]):
                return begin
            begin += 1
        return len(self._text)

    def string(self) -> Steps[str]:
        """Reads a JSON string if it comes next; empty if it does not, or does not end."""
        if not (yield from self.skip('"')):
            return ""
        parts = ['"']
        while True:
            parts.append((yield from self.run(_STRING)))
            if (yield from self.skip('"')):
                return "".join([*parts, '"'])
            if not (yield from self.skip("\\")):
                return ""
            parts.append("\\" + (yield from self.peek()))
            self._read(min(self._at + 1, len(self._text)))

    def nested(self) -> Steps[bool]:
        """Reads a JSON object or array up to the bracket that closes it. Returns whether it is
        closed. Brackets of the other kind, which a model may have forgotten, do not count."""
        opening = yield from self.peek()
        closing, others = _NESTED[opening]
        depth = 0
        while True:
            yield from self.run(others)
            if (yield from self.skip(opening)):
                depth += 1
            elif (yield from self.skip(closing)):
                depth -= 1
                if not depth:
                    return True
            elif not (yield from self.string()):
                return False

    def value(self) -> Steps[bool]:
        """Reads any JSON value. Returns whether there is one."""
        first = yield from self.peek()
        if first and first in _NESTED:
            return (yield from self.nested())
        return bool((yield from self.string()) or (yield from self.run(SCALAR)))
