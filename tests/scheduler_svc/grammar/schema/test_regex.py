"""Regular expressions: each is rejected, or matches as in Python, inside and outside of JSON."""

from __future__ import annotations

import json
import random
import re
import warnings

import pytest

from scheduler_svc.grammar.compiler import Matcher, compile_grammar
from scheduler_svc.grammar.errors import GrammarError
from shared.sampling_params import GrammarKind
from tests.scheduler_svc.grammar.schema.walks import END, allows, compilers, completions

REJECTED = {
    "^(?![abc])[a-d]$": "lookaheads are not supported (at position 3)",
    "^(?=.*[0-9])[a-z0-9]{4}$": "lookaheads",
    "(?<=a)b": "lookbehinds",
    "(?<!a)b": "lookbehinds",
    "(?>a+)b": "atomic groups",
    "(?#a)b": "comments",
    "(?P<x>a)(?P=x)": "backreferences",
    "(a)?(?(1)b|c)": "conditions",
    r"(a)\1": r"'\1' is not supported (at position 4)",
    r"(?P<x>a)\k<x>": r"'\k' is not supported",
    "(?i)a": "flags",
    "(?i:a)": "flags",
    "a$b": "'$' is only supported at the end",
    "a^b": "'^' is only supported at the start",
    "(^a)*": "'^' is only supported at the start",
    "(a$)+b?": "'$' is only supported at the end",
    "(a|$)b": "'$' is only supported at the end",
    r"\ba": r"'\b' is not supported",
    r"a\B": r"'\B' is not supported",
    r"\Aa\Z": r"'\A' is not supported",
    r"\p{L}": r"'\p' is not supported",
    r"\cA": r"'\c' is not supported",
    r"\x4": r"'\x' is not supported",
    r"\u{61}": r"'\u' is not supported",
    r"\ud83d": "a surrogate is no character",
    r"[\ud800-\udfff]": "a surrogate is no character",
    "a*+": "possessive quantifiers",
    "a{2}+": "possessive quantifiers",
    "a**": "multiple repeat",
    "a{,3}": "'{,' is not supported, but '{0,' is",
    "a{9999999}": "more than 6 digits",
    "a{3,1}": "3 to 1 is no range",
    "*a": "nothing to repeat",
    "^*": "nothing to repeat",
    "(a": "the parenthesis is not closed (at position 1)",
    "a)": "unmatched ')' (at position 2)",
    "[a": "the class is not closed",
    "[]a]": "an empty class is not supported",
    "[z-a]": "a range of characters without end or beginning",
    r"[a-\d]": "a range of characters without end or beginning",
    r"[^\s\S]": "matches nothing",
    "a\\": r"'\' is not supported",
    "(" * 65 + ")" * 65: "is nested more than 64 deep",
}


@pytest.mark.parametrize("pattern", REJECTED)
def test_what_cannot_be_enforced_is_rejected(pattern: str) -> None:
    schema = json.dumps({"type": "string", "pattern": pattern})
    for kind, text in ((GrammarKind.REGEX, pattern), (GrammarKind.JSON_SCHEMA, schema)):
        with pytest.raises(GrammarError) as caught:
            compile_grammar(compilers(), kind, text)
        assert REJECTED[pattern] in caught.value.reason


MATCHES: dict[str, tuple[list[str], list[str]]] = {
    "^a$": (["a"], ["aa", ""]),
    "^a|b$": (["a", "b"], ["ab"]),
    "(^a|b)c$": (["ac", "bc"], ["c"]),
    "^(?:^a)?$": (["a", ""], ["aa"]),
    "(?:a{2,})?": (["", "aa", "aaa"], ["a"]),
    "(?:/a*)?b": (["b", "/b", "/aab"], ["ab"]),
    "(?:[0-9]{1,2}){0,2}|x?": (["", "1234", "x"], ["12345"]),
    r"[\^a]": (["^", "a"], ["b"]),
    "[a^]": (["^", "a"], ["b"]),
    r"[\^-a]": (["^", "_", "a"], ["]", "b"]),
    r"[]\[-]".replace("[]", r"[\]"): (["]", "[", "-"], ["a"]),
    "[^a-c]": (["d", "é", "日", "😀"], ["a", "c", ""]),
    "[^é]": (["e", "è"], ["é"]),
    ".": (["a", "é", "😀"], ["\n", "ab"]),
    "(.|\n)*": (["a\nb", ""], []),
    r"\d+": (["0", "42"], ["a", ""]),
    r"\w\W": (["a.", "_ "], ["ab", ".."]),
    r"[^\W]": (["a", "_"], ["."]),
    r"\D": (["a", "é"], ["0", "٣"]),
    r"\s\S": ([" a", "\ta", " é"], ["  ", "aa"]),
    r"[\d.-]{2}": (["1.", "-2"], ["a1"]),
    r"\/\.\-\$": (["/.-$"], ["/a-$"]),
    r"\x41é\u0042": (["AéB"], ["aéb"]),
    "a{2}b{0}c{1,}d{0,1}": (["aac", "aaccd"], ["aabc", "aa"]),
    "a+?b*?": (["a", "ab"], ["b"]),
    "(?P<year>[0-9]{2})(?:-|_)": (["12-"], ["12"]),
    "a{b}": (["a{b}"], ["ab"]),
    "": ([""], ["a"]),
}


@pytest.mark.parametrize("pattern", MATCHES)
def test_what_is_accepted_matches_as_in_python(pattern: str) -> None:
    some, none = MATCHES[pattern]
    for text in (*some, *none):
        assert bool(re.fullmatch(pattern, text)) is (text in some), "the table is wrong"
        assert _matches(pattern, text) is (text in some), text
        if not set('"\\\n\t') & set(text):  # which JSON escapes
            schema = {"type": "string", "pattern": pattern}
            assert allows(schema, f'"{text}"') is (text in some), text


def _matches(pattern: str, text: str) -> bool:
    matcher = Matcher(compile_grammar(compilers(), GrammarKind.REGEX, pattern), {END})
    try:
        for byte in (*text.encode(), END):
            matcher.accept(byte)
    except GrammarError:
        return False
    return matcher.finished


_PARTS = [
    r"a",
    r"b",
    r"0",
    r"é",
    r"日",
    r"-",
    r"_",
    r".",
    r"\d",
    r"\w",
    r"\s",
    r"\D",
    r"\W",
    r"\S",
    r"\.",
    r"\^",
    r"\x41",
    r"\u00e9",
    r"{",
    r"}",
    r"[ab]",
    r"[^a]",
    r"[\^a]",
    r"[^\d\s]",
    r"[é-日]",
    r"[-a]",
    r"[ -~]",
    r"[^\W]",
    r"[\]^]",
    r"(a|b)",
    r"(|a)",
    r"(a*b)",
    r"(?:ab)",
]
_REPEATS = ["*", "+", "?", "{2}", "{1,2}", "{0,2}", "{2,}", "*?", "{0}"]


def _expression(rng: random.Random, depth: int = 0) -> str:
    match rng.randrange(3) if depth < 3 else 2:
        case 0:
            return f"(?:{_expression(rng, depth + 1)}){rng.choice(_REPEATS)}"
        case 1:
            joint = rng.choice(["", "|"])
            return f"(?:{_expression(rng, depth + 1)}{joint}{_expression(rng, depth + 1)})"
        case _:
            return rng.choice(_PARTS)


@pytest.mark.parametrize("start", range(0, 400, 100))
def test_random_expressions_match_as_in_python(start: int) -> None:
    for seed in range(start, start + 100):
        rng = random.Random(seed)
        pattern = _expression(rng)
        schema = json.dumps({"type": "string", "pattern": pattern})
        with warnings.catch_warnings(action="ignore"):
            expected = re.compile(pattern)
        for text in completions(GrammarKind.REGEX, pattern, rng, 3):
            assert expected.fullmatch(text), f"seed {seed}: {text!r} of {pattern}"
        for text in completions(GrammarKind.JSON_SCHEMA, schema, rng, 3):
            assert expected.fullmatch(json.loads(text)), f"seed {seed}: {text!r} of {pattern}"


def test_an_expression_in_a_structural_tag_is_read_alike() -> None:
    tag = {"type": "structural_tag", "format": {"type": "regex", "pattern": "(?!a)[ab]"}}
    with pytest.raises(GrammarError, match="a 'regex' in it: lookaheads are not supported"):
        compile_grammar(compilers(), GrammarKind.STRUCTURAL_TAG, json.dumps(tag))
    tag["format"]["pattern"] = r"[\^a]"
    found = set(completions(GrammarKind.STRUCTURAL_TAG, json.dumps(tag), random.Random(0), 20))
    assert found == {"^", "a"}
