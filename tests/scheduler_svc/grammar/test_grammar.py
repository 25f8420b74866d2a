"""Structured output with the demo model's tokenizer, and random choices among allowed tokens."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from scheduler_svc.grammar.compiler import (
    Compilers,
    Matcher,
    compile_grammar,
    make_compilers,
)
from scheduler_svc.grammar.errors import GrammarError
from scheduler_svc.grammar.vocabulary import read_vocabulary
from shared.sampling_params import GrammarKind
from tests.scheduler_svc.grammar.schema.walks import allowed

DEMO = Path(__file__).parents[3] / "models" / "demo"
VOCABULARY = list(read_vocabulary(DEMO).tokens.values())
IM_END = 1535  # the demo model's end token; it spells nothing
MAX_WHITESPACE = 20
SPECIAL = {1533, 1534, 1535}
ENDS = frozenset({IM_END})

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "height": {"type": "number"},
        "tags": {"type": "array", "items": {"enum": ["a", "é", None]}, "maxItems": 3},
        "home": {"$ref": "#/$defs/place", "description": "where"},
    },
    "required": ["name", "age"],
    "$defs": {
        "place": {
            "type": "object",
            "properties": {
                "city": {"const": "Bern"},
                "zip": {"type": "string", "pattern": "^\\d{4}$"},
            },
            "required": ["zip"],
            "additionalProperties": False,
        }
    },
}


Begin = Callable[..., Matcher]
Compile = Callable[[GrammarKind, str, Iterable[int]], Begin]


def test_the_vocabulary_of_a_language_model_beside_images(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").symlink_to(DEMO / "tokenizer.json")
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 1540}}')
    assert len(read_vocabulary(tmp_path).tokens) == 1540


@pytest.fixture(scope="module")
def compilers() -> Compilers:
    return make_compilers(read_vocabulary(DEMO), MAX_WHITESPACE)


@pytest.fixture
def compile(compilers: Compilers) -> Compile:
    """Returns a function that opens matchers, which may be given tokens."""

    def compile(kind: GrammarKind, text: str, ends: Iterable[int]) -> Begin:
        compiled = compile_grammar(compilers, kind, text)

        def begin(tokens: Iterable[int] = ()) -> Matcher:
            matcher = Matcher(compiled, ends)
            for token in tokens:
                matcher.accept(token)
            return matcher

        return begin

    return compile


def spell(*texts: str) -> list[int]:
    """The tokens that spell exactly these texts, one each."""
    return [VOCABULARY.index(text.encode()) for text in texts]


def text_of(tokens: Iterable[int]) -> str:
    """xgrammar also allows surrogates, which are no characters by themselves."""
    return b"".join(VOCABULARY[token] for token in tokens).decode(errors="surrogatepass")


CLOSERS = frozenset(spell('"', "}", "]", ",", ":", "0"))


def walk(matcher: Matcher, rng: random.Random, closing: frozenset[int]) -> list[int]:
    """Picks allowed tokens at random until the end, with a bias towards those that close."""
    tokens: list[int] = []
    while not matcher.finished:
        choice = allowed(matcher.mask())
        closers = [token for token in choice if token in closing]
        if closers and (len(tokens) > 100 or rng.random() < 0.4):
            choice = closers
        tokens.append(rng.choice(choice))
        matcher.accept(tokens[-1])
        assert len(tokens) < 5000, "does not end"
    return tokens


def matches_person(text: str) -> bool:
    jsonschema.validate(json.loads(text), PERSON)
    return True


def is_json(text: str) -> bool:
    return isinstance(json.loads(text), dict | list)


def tool_calls(text: str) -> bool:
    calls = re.findall(r"<call>(.*?)</call>", text, re.DOTALL)
    for call in calls:
        jsonschema.validate(json.loads(call), PERSON)
    return bool(calls) and "<call>" not in re.sub(r"<call>.*?</call>", "", text, flags=re.DOTALL)


TAG = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<call>"],
        "tags": [
            {
                "type": "tag",
                "begin": "<call>",
                "content": {"type": "json_schema", "json_schema": PERSON},
                "end": "</call>",
            }
        ],
        "at_least_one": True,
        "stop_after_first": True,
    },
}


KINDS: dict[str, tuple[GrammarKind, str, Callable[[str], Any]]] = {
    "json_schema": (GrammarKind.JSON_SCHEMA, json.dumps(PERSON), matches_person),
    "json": (GrammarKind.JSON, "", is_json),
    "structural_tag": (GrammarKind.STRUCTURAL_TAG, json.dumps(TAG), tool_calls),
    "regex": (
        GrammarKind.REGEX,
        r"[A-Z][a-z]{0,9}( (né|[0-9]+))?@(a|bc)+\.",
        re.compile(r"[A-Z][a-z]{0,9}( (né|[0-9]+))?@(a|bc)+\.").fullmatch,
    ),
    "choice": (
        GrammarKind.EBNF,
        'root ::= "yes" | "yesterday" | "no\\n" | "你好"',
        {"yes", "yesterday", "no\n", "你好"}.__contains__,
    ),
    "recursion": (
        GrammarKind.EBNF,
        'root ::= term ("+" term)*\nterm ::= [0-9] | "(" root ")"',
        re.compile(r"[0-9+()]+").fullmatch,
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_allowed_tokens_match_the_grammar(name: str, compile: Compile) -> None:
    kind, text, matches = KINDS[name]
    begin = compile(kind, text, ENDS)
    for seed in range(25):
        tokens = walk(begin(), random.Random(seed), CLOSERS | ENDS)
        assert tokens[-1] == IM_END
        assert not SPECIAL.intersection(tokens[:-1]), f"seed {seed}"
        assert matches(text_of(tokens[:-1])), f"seed {seed}: {text_of(tokens)!r}"


@pytest.mark.parametrize("vocab_size", [1536, 1537, 1600, 1601])
def test_ids_that_spell_nothing_are_never_allowed(vocab_size: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    compiled = compile_grammar(
        make_compilers(read_vocabulary(tmp_path), None), GrammarKind.REGEX, "(.|\n)*"
    )
    mask = Matcher(compiled, {IM_END, vocab_size}).mask()
    assert len(mask) == 4 * ((vocab_size + 31) // 32)
    tokens = allowed(mask)
    assert {1533, 1534}.isdisjoint(tokens)  # they would read as text
    assert max(tokens) == IM_END
    assert len(tokens) > 1000


def test_only_an_end_token_may_follow_a_complete_text(compile: Compile) -> None:
    begin = compile(GrammarKind.REGEX, "ab?", {IM_END, 1533})
    matcher = begin(spell("a"))
    assert allowed(matcher.mask()) == sorted([*spell("b"), 1533, IM_END])
    matcher.accept(*spell("b"))
    assert allowed(matcher.mask()) == [1533, IM_END]
    assert not matcher.finished
    matcher.accept(1533)
    assert matcher.finished


def test_an_end_token_that_spells_something_is_not_allowed_before(compile: Compile) -> None:
    (dot,) = spell(".")
    begin = compile(GrammarKind.REGEX, r"[a.]{2}", {dot})
    assert dot not in allowed(begin().mask())
    matcher = begin(spell("a", "a"))
    assert allowed(matcher.mask()) == [dot]
    matcher.accept(dot)
    assert matcher.finished


def test_without_end_tokens_it_ends_when_nothing_more_can_follow(compile: Compile) -> None:
    begin = compile(GrammarKind.REGEX, "ab?", ())
    matcher = begin(spell("a"))
    assert not matcher.finished
    assert allowed(matcher.mask()) == spell("b")
    matcher.accept(*spell("b"))
    assert matcher.finished
    assert compile(GrammarKind.REGEX, "", ())().finished


def test_tokens_that_do_not_match_are_rejected(compile: Compile) -> None:
    begin = compile(GrammarKind.REGEX, "ab", ENDS)
    for wrong in ([*spell("a", "a")], [*spell("a", "b"), IM_END, IM_END], [*spell("a"), IM_END]):
        with pytest.raises(GrammarError, match=r"structured_output\.regex: token \d+ at index"):
            begin(wrong)


def drafted(matcher: Matcher, guess: Iterable[int], max_tokens: int = 8) -> list[int]:
    """The drafted tokens. Each must come with the mask that follows it, and the matcher stay."""
    before = matcher.mask()
    draft = matcher.draft(guess, max_tokens)
    assert matcher.mask() == before
    masks = [mask for _, mask in draft]
    for token, mask in draft:
        matcher.accept(token)
        assert matcher.mask() == mask
    assert len(masks) <= max_tokens
    return [token for token, _ in draft]


def test_forced_text_is_drafted(compile: Compile) -> None:
    begin = compile(GrammarKind.REGEX, '(a|b)"name": [0-9]', ENDS)
    assert not drafted(begin(), [])
    assert text_of(drafted(begin(spell("a")), [])) == '"name": '
    assert text_of(drafted(begin(spell("b")), [], max_tokens=1)) == '"'


def test_a_guess_is_drafted_as_far_as_it_is_allowed(compile: Compile) -> None:
    begin = compile(GrammarKind.REGEX, "[ab]{5}x(y|z)", ENDS)
    a, b, x = spell("a", "b", "x")
    assert drafted(begin(), [a, b, a]) == [a, b, a]
    assert drafted(begin(), [a, b, x, a]) == [a, b]
    assert drafted(begin(), [a, b, a, b, b, IM_END]) == [a, b, a, b, b, x]
    assert drafted(begin(), [IM_END, a]) == []


def test_no_end_is_drafted(compile: Compile) -> None:
    assert not drafted(compile(GrammarKind.REGEX, "a", ENDS)(spell("a")), [IM_END])
    a = spell("a")
    assert not drafted(compile(GrammarKind.REGEX, "a", ())(), a)  # nothing can follow


def test_a_dead_end_is_an_error(compile: Compile) -> None:
    """`b` cannot follow `a`: it is an end token, and the grammar is not complete before it."""
    dead = compile(GrammarKind.REGEX, "ab|c", spell("b"))(spell("a"))
    with pytest.raises(GrammarError) as caught:
        dead.mask()
    assert str(caught.value) == (
        "sampling.structured_output.regex: after 1 tokens of the completion none can follow"
    )


@pytest.mark.parametrize("kind", ["json", "json_schema", "structural_tag"])
def test_whitespace_in_json_is_limited(kind: str, compile: Compile) -> None:
    grammar, text, _ = KINDS[kind]
    begin = "<call>{" if kind == "structural_tag" else "{"
    matcher = compile(grammar, text, ENDS)(spell(*begin, *" " * MAX_WHITESPACE))
    assert not any(VOCABULARY[token].isspace() for token in allowed(matcher.mask()))


BAD = [  # `schema` has more of schemas and of regular expressions
    (GrammarKind.JSON_SCHEMA, "", "json_schema: is not JSON: "),
    (GrammarKind.JSON_SCHEMA, '{"type": ', "json_schema: is not JSON: "),
    (GrammarKind.JSON_SCHEMA, "3", "json_schema: Schema should be an object or bool, but got 3"),
    (GrammarKind.JSON_SCHEMA, '{"type": "text"}', 'json_schema: Unsupported type "text"'),
    (GrammarKind.JSON_SCHEMA, '{"type": 3}', "json_schema: Type should be a string"),
    (GrammarKind.JSON_SCHEMA, '{"enum": 3}', "json_schema: "),
    (GrammarKind.JSON_SCHEMA, '{"type": "integer", "minimum": 1e400}', "json_schema: "),
    (GrammarKind.JSON_SCHEMA, '{"anyOf": [' * 400 + "{}" + "]}" * 400, "nested more than 64 deep"),
    (GrammarKind.JSON_SCHEMA, '{"anyOf": [' * 4500 + "{}" + "]}" * 4500, "more than 64 deep"),
    (GrammarKind.STRUCTURAL_TAG, "{}", "structural_tag: Invalid structural tag error: "),
    (GrammarKind.STRUCTURAL_TAG, "[" * 100 + "]" * 100, "nested more than 64 deep"),
    (GrammarKind.STRUCTURAL_TAG, '{"structures": [{"begin": "a"}]}', "'structures' must be a list"),
    (GrammarKind.STRUCTURAL_TAG, '{"structures": [{"begin": 1, "schema": {}, "end": ""}]}', "tag"),
    (GrammarKind.REGEX, "(a", "regex: the parenthesis is not closed (at position 1)"),
    (GrammarKind.REGEX, "a\0b", "regex: The regex must not contain null characters"),
    (GrammarKind.REGEX, "(" * 30000, "regex: "),
    (GrammarKind.EBNF, "", "grammar: EBNF parser error at line 1, column 1: The root rule with"),
    (GrammarKind.EBNF, 'main ::= "a"', 'The root rule with name "root" is not found'),
    (GrammarKind.EBNF, "root ::= x", 'Rule "x" is not defined'),
    (GrammarKind.EBNF, 'root ::= "a', "grammar: EBNF lexer error at line 1, column 12"),
    (GrammarKind.EBNF, "root ::= root", "grammar: after 0 tokens"),
]


@pytest.mark.parametrize(("kind", "text", "reason"), BAD, ids=lambda value: str(value)[:20])
def test_a_bad_grammar_is_rejected_in_one_line(
    kind: GrammarKind, text: str, reason: str, compile: Compile
) -> None:
    with pytest.raises(GrammarError) as caught:
        compile(kind, text, ENDS)
    message = str(caught.value)
    assert message.startswith("sampling.structured_output.")
    assert reason in message
    assert "\n" not in message
    assert "cpp" not in message
    assert len(message) < 300


def test_the_vocabulary_is_what_the_tokenizer_decodes() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    for token, spelled in enumerate(VOCABULARY):
        decoded = tokenizer.decode([token], skip_special_tokens=True)
        assert spelled.decode(errors="replace") == decoded


def test_the_older_form_of_a_structural_tag_means_triggered_tags(compile: Compile) -> None:
    structure = {"begin": "<call>", "schema": json.dumps(PERSON), "end": "</call>"}
    older = json.dumps({"structures": [structure], "triggers": ["<call>"]})
    matcher = compile(GrammarKind.STRUCTURAL_TAG, older, ENDS)()
    for token in spell(*"I do. <call>"):
        assert IM_END in allowed(matcher.mask()) or token == spell(">")[0]
        matcher.accept(token)
    assert {text_of([token])[0] for token in allowed(matcher.mask())} == {"{"}
