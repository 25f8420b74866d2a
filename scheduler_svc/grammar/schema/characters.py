"""Sets of characters, as sorted ranges of code points without surrogates."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

Ranges = tuple[tuple[int, int], ...]  # first and last of each, none adjacent to another

ALL: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))
JSON_ESCAPES: Ranges = ((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C))  # cannot be in a string as such
_NEWLINES: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
_DIGITS: Ranges = ((0x30, 0x39),)
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE: Ranges = ((0x09, 0x0D), (0x20, 0x20))
_MAYBE_SPACE: Ranges = (
    (0x09, 0x0D),
    (0x1C, 0x20),
    (0x85, 0x85),
    (0xA0, 0xA0),
    (0x1680, 0x1680),
    (0x2000, 0x200A),
    (0x2028, 0x2029),
    (0x202F, 0x202F),
    (0x205F, 0x205F),
    (0x3000, 0x3000),
    (0xFEFF, 0xFEFF),
)


def union(sets: Iterable[Ranges]) -> Ranges:
    joined: list[tuple[int, int]] = []
    for first, last in sorted(each for ranges in sets for each in ranges):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    return tuple(joined)


def intersection(one: Ranges, other: Ranges) -> Ranges:
    met = [(max(a, c), min(b, d)) for a, b in one for c, d in other if a <= d and c <= b]
    return union([tuple(met)])


def difference(one: Ranges, other: Ranges) -> Ranges:
    return intersection(one, complement(other))


def complement(ranges: Ranges) -> Ranges:
    """The characters that are not in `ranges`."""
    gaps, start = [], 0
    for first, last in union([ranges, ((0xD800, 0xDFFF),)]):
        gaps.append((start, first - 1))
        start = last + 1
    gaps.append((start, 0x10FFFF))
    return tuple((first, last) for first, last in gaps if first <= last)


class Class(NamedTuple):
    """The matches of a class of a regular expression. Python and ECMAScript disagree about `\\d`,
    `\\w`, `\\s` and `.`, so there are characters that it only may match.
    """

    surely: Ranges
    maybe: Ranges

    @property
    def inverse(self) -> Class:
        return Class(complement(self.maybe), complement(self.surely))


def single(code: int) -> Class:
    return Class(((code, code),), ((code, code),))


def named(letter: str) -> Class | None:
    """The class that a backslash and a letter denote."""
    match letter.lower():
        case "d":
            found = Class(_DIGITS, _decimals())
        case "w":
            found = Class(_WORD, union([_WORD, ((0x80, 0x10FFFF),)]))
        case "s":
            found = Class(_SPACE, _MAYBE_SPACE)
        case _:
            return None
    return found.inverse if letter.isupper() else found


DOT = Class(complement(_NEWLINES), complement(((0x0A, 0x0A),)))


@cache
def _decimals() -> Ranges:
    """The digits of all scripts."""
    return union([tuple((code, code) for code in range(0x110000) if chr(code).isdecimal())])
