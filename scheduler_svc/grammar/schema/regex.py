"""Reads regular expressions.

The syntax is what Python and ECMAScript have in common, except for what cannot be enforced. A match
is one of the whole text, as if the expression were between `^` and `$`.
"""

from __future__ import annotations

import re
from typing import NoReturn

from scheduler_svc.grammar.schema import characters
from scheduler_svc.grammar.schema.characters import Class
from scheduler_svc.grammar.schema.nodes import (
    EMPTY,
    NOTHING,
    Anchor,
    Characters,
    Choice,
    Node,
    Repeat,
    Sequence,
    choice,
    repeat,
    sequence,
)

MAX_DEPTH = 64  # of nested groups
_MAX_DIGITS = 6
_BOUNDS = re.compile(r"\{([0-9]+)(,([0-9]*))?\}|\{,[0-9]*\}")
_GROUP_NAME = re.compile(r"P?<[A-Za-z_][A-Za-z0-9_]*>")
_HEX = re.compile(r"[0-9a-fA-F]+")
_ESCAPES = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_HEX_DIGITS = {"x": 2, "u": 4}
_GROUPS = {
    "=": "lookaheads",
    "!": "lookaheads",
    "<=": "lookbehinds",
    "<!": "lookbehinds",
    ">": "atomic groups",
    "#": "comments",
    "P=": "backreferences",
    "(": "conditions",
}


class RegexError(Exception):
    """An expression cannot be used; the message says why."""


def parse(text: str) -> Node:
    """Reads an expression.

    Raises:
        RegexError: it is no regular expression, or one of its parts cannot be enforced.
    """
    if "\0" in text:
        raise RegexError("The regex must not contain null characters")
    parser = _Parser(text)
    node = parser.choice(0)
    if parser.at < len(text):
        parser.fail("unmatched ')'")
    node = _without_anchors(node, at_start=True, at_end=True)
    if node == NOTHING:
        raise RegexError("matches nothing")
    return node


def _without_anchors(node: Node, at_start: bool, at_end: bool) -> Node:
    match node:
        case Anchor():
            if at_start if node.is_start else at_end:
                return EMPTY
            raise RegexError(
                "'^' is only supported at the start"
                if node.is_start
                else "'$' is only supported at the end"
            )
        case Sequence():
            full = [index for index, part in enumerate(node.parts) if not _is_empty(part)]
            first, last = (full[0], full[-1]) if full else (len(node.parts), -1)
            return sequence(
                _without_anchors(part, at_start and index <= first, at_end and index >= last)
                for index, part in enumerate(node.parts)
            )
        case Choice():
            return choice(_without_anchors(each, at_start, at_end) for each in node.options)
        case Repeat():
            once = node.most == 1
            body = _without_anchors(node.body, once and at_start, once and at_end)
            return repeat(body, node.least, node.most)
        case Characters():
            return node


def _is_empty(node: Node) -> bool:
    """Whether all matches are empty."""
    match node:
        case Characters():
            return False
        case Sequence():
            return all(map(_is_empty, node.parts))
        case Choice():
            return all(map(_is_empty, node.options))
        case Repeat():
            return _is_empty(node.body)
        case Anchor():
            return True


class _Parser:
    """Reads an expression from `at` on."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def fail(self, reason: str) -> NoReturn:
        raise RegexError(f"{reason} (at position {self.at + 1})")

    def choice(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise RegexError(f"is nested more than {MAX_DEPTH} deep")
        options = [self._sequence(depth)]
        while self._take("|"):
            options.append(self._sequence(depth))
        return choice(options)

    def _sequence(self, depth: int) -> Node:
        parts: list[Node] = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            parts.append(self._repeated(depth))
        return sequence(parts)

    def _repeated(self, depth: int) -> Node:
        if self._bounds():
            self.fail("nothing to repeat")
        atom = self._atom(depth)
        start = self.at
        if not (bounds := self._bounds()):
            return atom
        least, most = bounds
        if isinstance(atom, Anchor):
            self.at = start
            self.fail("nothing to repeat")
        if most is not None and least > most:
            self.at = start
            self.fail(f"{least} to {most} is no range")
        if self._take("+"):
            self.fail("possessive quantifiers are not supported")
        self._take("?")  # what is matched does not depend on laziness
        if self._bounds():
            self.fail("multiple repeat")
        return repeat(atom, least, most)

    def _bounds(self) -> tuple[int, int | None] | None:
        """Takes a quantifier, if there is one."""
        if self._take("*"):
            return 0, None
        if self._take("+"):
            return 1, None
        if self._take("?"):
            return 0, 1
        found = _BOUNDS.match(self.text, self.at)
        if not found:
            return None
        if not found[1]:
            self.fail("'{,' is not supported, but '{0,' is")
        if max(len(found[1]), len(found[3] or "")) > _MAX_DIGITS:
            self.fail(f"more than {_MAX_DIGITS} digits in a repetition are not supported")
        self.at = found.end()
        least = int(found[1])
        return least, least if found[2] is None else int(found[3]) if found[3] else None

    def _atom(self, depth: int) -> Node:
        character = self.text[self.at]
        if character in "^$":
            self.at += 1
            return Anchor(character == "^")
        if self._take("("):
            return self._group(depth)
        if self._take("["):
            return self._class()
        if self._take("."):
            return Characters(characters.DOT.surely)
        if character == "\\":
            return Characters(self._escape(in_class=False).surely)
        return Characters(self._literal().surely)

    def _group(self, depth: int) -> Node:
        start = self.at
        if self._take("?") and not self._take(":"):
            for mark, name in _GROUPS.items():
                if self.text.startswith(mark, self.at):
                    self.at = start
                    self.fail(f"{name} are not supported")
            if not (named := _GROUP_NAME.match(self.text, self.at)):
                self.at = start
                self.fail("flags are not supported")
            self.at = named.end()
        node = self.choice(depth + 1)
        if not self._take(")"):
            self.at = start - 1
            self.fail("the parenthesis is not closed")
        return node

    def _class(self) -> Node:
        start, negated = self.at - 1, self._take("^")
        if self.text.startswith("]", self.at):
            self.fail("an empty class is not supported")
        items: list[Class] = []
        while not self._take("]"):
            if self.at >= len(self.text):
                self.at = start
                self.fail("the class is not closed")
            items.append(self._class_item())
        surely = characters.union(each.surely for each in items)
        maybe = characters.union(each.maybe for each in items)
        found = Class(surely, maybe)
        ranges = (found.inverse if negated else found).surely
        return Characters(ranges) if ranges else NOTHING

    def _class_item(self) -> Class:
        first = self._class_character()
        if not self.text.startswith("-", self.at) or self.text.startswith("]", self.at + 1):
            return first
        start = self.at
        self.at += 1
        if self.at >= len(self.text):
            return first
        last = self._class_character()
        (low, high), (low_end, high_end) = first.surely[0], last.surely[-1]
        if low != high or low_end != high_end or low > low_end:
            self.at = start
            self.fail("a range of characters without end or beginning")
        ranges = characters.intersection(((low, low_end),), characters.ALL)
        return Class(ranges, ranges)

    def _class_character(self) -> Class:
        if self.text[self.at] == "\\":
            return self._escape(in_class=True)
        return self._literal()

    def _escape(self, in_class: bool) -> Class:
        start = self.at
        letter = self.text[self.at + 1 : self.at + 2]
        self.at += 2
        if found := characters.named(letter):
            return found
        if letter in _HEX_DIGITS:
            digits = self.text[self.at : self.at + _HEX_DIGITS[letter]]
            self.at += len(digits)
            if _HEX.fullmatch(digits) and len(digits) == _HEX_DIGITS[letter]:
                return self._single(int(digits, 16))
        elif letter == "b" and in_class:
            return characters.single(0x08)
        elif letter in _ESCAPES and not self.text[self.at : self.at + 1].isdecimal():
            return characters.single(_ESCAPES[letter])
        elif letter and letter.isascii() and not letter.isalnum():
            return self._single(ord(letter))
        self.at = start
        self.fail(f"'\\{letter}' is not supported")

    def _literal(self) -> Class:
        self.at += 1
        return self._single(ord(self.text[self.at - 1]))

    def _single(self, code: int) -> Class:
        if 0xD800 <= code <= 0xDFFF:
            self.fail("a surrogate is no character")
        return characters.single(code)

    def _take(self, text: str) -> bool:
        if not self.text.startswith(text, self.at):
            return False
        self.at += len(text)
        return True
