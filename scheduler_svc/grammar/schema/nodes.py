"""Regular expressions as trees, and the form of them that xgrammar reads without mistakes.

xgrammar ignores some parts of an expression, such as lookaheads and inner anchors, and misreads
others, such as `[\\^a]`. So it only ever receives what `to_text` writes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from scheduler_svc.grammar.schema import characters
from scheduler_svc.grammar.schema.characters import Ranges

_MAX_WORD = 32  # characters
_META = set("^$\\.*+?()[]{}|/")


@dataclass(frozen=True, slots=True)
class Characters:
    """One character of a set."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Sequence:
    parts: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several; without options it matches nothing."""

    options: tuple[Node, ...] = ()


@dataclass(frozen=True, slots=True)
class Repeat:
    """`least` to `most` times in a row; None: any number."""

    body: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Anchor:
    """`^` or `$`; none is left once an expression was read."""

    is_start: bool


Node = Characters | Sequence | Choice | Repeat | Anchor
NOTHING = Choice()
EMPTY = Sequence()


def literal(text: str) -> Node:
    """Matches exactly `text`."""
    return sequence(Characters(((ord(each), ord(each)),)) for each in text)


def sequence(parts: Iterable[Node]) -> Node:
    flat: list[Node] = []
    for part in parts:
        if part == NOTHING:
            return NOTHING
        flat += part.parts if isinstance(part, Sequence) else (part,)
    return flat[0] if len(flat) == 1 else Sequence(tuple(flat))


def choice(options: Iterable[Node]) -> Node:
    flat: dict[Node, None] = {}  # ordered
    for option in options:
        flat |= dict.fromkeys(option.options if isinstance(option, Choice) else (option,))
    if EMPTY in flat:
        del flat[EMPTY]
        return repeat(choice(flat), 0, 1)
    return next(iter(flat)) if len(flat) == 1 else Choice(tuple(flat))


def repeat(body: Node, least: int, most: int | None) -> Node:
    if most == 0 or body == EMPTY:
        return EMPTY
    if body == NOTHING:
        return NOTHING if least else EMPTY
    return body if least == most == 1 else Repeat(body, least, most)


def restrict(node: Node, ranges: Ranges) -> Node:
    """Matches the texts of `node` that have only the characters of `ranges`."""
    match node:
        case Characters():
            left = characters.intersection(node.ranges, ranges)
            return Characters(left) if left else NOTHING
        case Sequence():
            return sequence(restrict(part, ranges) for part in node.parts)
        case Choice():
            return choice(restrict(option, ranges) for option in node.options)
        case Repeat():
            return repeat(restrict(node.body, ranges), node.least, node.most)
        case Anchor():
            return node


def begins_with(node: Node) -> Ranges:
    """The characters that a match may begin with; all, if a match may be empty."""
    first, may_be_empty = _first(node)
    return characters.ALL if may_be_empty else first


def any_but(words: Iterable[str], ranges: Ranges, depth: int = 0) -> Node:
    """Matches all texts over `ranges` but `words`. If a word is longer than `_MAX_WORD`, also none
    that begins as it does."""
    tails: dict[str, list[str]] = {}
    words = list(words)
    for word in words:
        if word:
            tails.setdefault(word[0], []).append(word[1:])
    heads = characters.union([((ord(head), ord(head)),) for head in tails])
    others = characters.difference(ranges, heads)
    options = [sequence([Characters(others), Repeat(Characters(ranges), 0, None)])]
    for head, rest in tails.items() if depth < _MAX_WORD else ():
        options.append(sequence([literal(head), any_but(rest, ranges, depth + 1)]))
    if "" not in words:
        options.append(EMPTY)
    return restrict(choice(options), ranges)


def to_text(node: Node) -> str:
    """Writes an expression, which must match something, in printable ASCII."""
    match node:
        case Characters():
            return _class_text(node.ranges)
        case Sequence():
            return "".join(_grouped(part, Choice) for part in node.parts)
        case Choice():
            return "|".join(map(to_text, node.options))
        case Repeat():
            return _grouped(node.body, Choice, Sequence, Repeat) + _quantifier(node)
        case Anchor():
            raise AssertionError(node)


def to_json_text(node: Node) -> str:
    """Writes an expression for the inside of a JSON string, without what JSON escapes.

    Any character beyond ASCII makes xgrammar read an expression as it does outside of JSON. Its
    other way to read them takes `(?:a{2,})?` for `a*`, and allows bytes that are no UTF-8.
    """
    return to_text(node) + "\u00e9{0}"


def _first(node: Node) -> tuple[Ranges, bool]:
    """The characters that begin a match, and whether a match may be empty."""
    match node:
        case Characters():
            return node.ranges, False
        case Sequence():
            found: list[Ranges] = []
            for part in node.parts:
                first, may_be_empty = _first(part)
                found.append(first)
                if not may_be_empty:
                    return characters.union(found), False
            return characters.union(found), True
        case Choice():
            firsts = [_first(option) for option in node.options]
            return characters.union(first for first, _ in firsts), any(empty for _, empty in firsts)
        case Repeat():
            first, may_be_empty = _first(node.body)
            return first, may_be_empty or node.least == 0
        case Anchor():
            return (), True


def _grouped(node: Node, *kinds: type) -> str:
    text = to_text(node)
    return f"(?:{text})" if isinstance(node, kinds) else text


def _quantifier(node: Repeat) -> str:
    match node.least, node.most:
        case 0, None:
            return "*"
        case 1, None:
            return "+"
        case 0, 1:
            return "?"
        case least, None:
            return f"{{{least},}}"
        case least, most:
            return f"{{{least}}}" if least == most else f"{{{least},{most}}}"


@cache
def _class_text(ranges: Ranges) -> str:
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _character_text(ranges[0][0])
    caret = ord("^")
    parts = []
    for first, last in ranges:
        if first == caret:  # not at the beginning, where xgrammar would take it for a negation
            parts.append(_character_text(caret))
            first += 1
        if first < last:
            parts.append(f"{_character_text(first)}-{_character_text(last)}")
        elif first == last:
            parts.append(_character_text(first))
    if parts[0] == _character_text(caret):
        parts.append(parts.pop(0))
    return f"[{''.join(parts)}]"


def _character_text(code: int) -> str:
    character = chr(code)
    if character in _META or character == "-":
        return "\\" + character
    if 0x20 <= code < 0x7F:
        return character
    return f"\\u{code:04x}" if code < 0x10000 else f"\\u{{{code:x}}}"
