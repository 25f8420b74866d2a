"""Structured output: what the frontend rejects, and how a choice is written as a grammar."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.text.structured_output import check_structured_output
from nano_vllm_grpc.pb import frontend_pb2 as pb
from shared.errors import InvalidArgumentError
from shared.sampling_params import Grammar, GrammarKind

KIB64 = 64 << 10


def choice(*options: str) -> pb.StructuredOutput:
    return pb.StructuredOutput(choice=pb.Choice(options=options))


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (pb.StructuredOutput(json_schema="{}"), Grammar(GrammarKind.JSON_SCHEMA, "{}")),
        (pb.StructuredOutput(regex="[a-z]+"), Grammar(GrammarKind.REGEX, "[a-z]+")),
        (pb.StructuredOutput(regex="x" * KIB64), Grammar(GrammarKind.REGEX, "x" * KIB64)),
        (pb.StructuredOutput(grammar="root ::="), Grammar(GrammarKind.EBNF, "root ::=")),
        (pb.StructuredOutput(json_object=True), Grammar(GrammarKind.JSON)),
        (pb.StructuredOutput(structural_tag="{}"), Grammar(GrammarKind.STRUCTURAL_TAG, "{}")),
        (choice("a", "b c"), Grammar(GrammarKind.EBNF, 'root ::= "a" | "b c"')),
        (
            choice('"\\', "\n\x00", "é\u2028", "👍\U000e0001"),
            Grammar(
                GrammarKind.EBNF,
                r'root ::= "\"\\" | "\u000A\u0000" | "é\u2028" | "👍\U000E0001"',
            ),
        ),
    ],
)
def test_each_kind_becomes_a_grammar(message: pb.StructuredOutput, expected: Grammar) -> None:
    assert check_structured_output(message) == expected


FIELD = "sampling.structured_output"


@pytest.mark.parametrize(
    ("message", "rejection"),
    [
        (pb.StructuredOutput(), ": empty; give one of json_schema, regex, grammar, choice, json_o"),
        (pb.StructuredOutput(json_object=False), ".json_object: false; must be true"),
        (pb.StructuredOutput(regex=""), ".regex: 0 bytes; must be 1 to 65536"),
        (pb.StructuredOutput(grammar="é" * KIB64), ".grammar: 131072 bytes; must be 1 to 65536"),
        (
            pb.StructuredOutput(json_schema='{"a":\n 1 "b"}'),
            ".json_schema: not JSON: Expecting ',' delimiter at line 2 column 4",
        ),
        (
            pb.StructuredOutput(json_schema="[NaN]"),
            ".json_schema: not JSON: NaN is not a JSON value",
        ),
        (pb.StructuredOutput(json_schema="[" * KIB64), ".json_schema: not readable"),
        (pb.StructuredOutput(json_schema="9" * KIB64), ".json_schema: not readable"),
        (choice(), ".choice.options: 0 given; must be 1 to 1024"),
        (choice(*["a"] * 1025), ".choice.options: 1025 given; must be 1 to 1024"),
        (choice("a", ""), ".choice.options[1]: empty"),
        (choice("a" * KIB64), ".choice.options: 65547 bytes as a grammar; the limit is 65536"),
    ],
)
def test_bad_ones_are_rejected_by_name(message: pb.StructuredOutput, rejection: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{re.escape(FIELD + rejection)}"):
        check_structured_output(message)


@given(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=5))
def test_a_choice_reads_back_as_it_was(options: list[str]) -> None:
    text = check_structured_output(choice(*options)).text
    literals = re.findall(r'"((?:[^"\\]|\\.)*)"', text)
    assert "root ::= " + " | ".join(f'"{literal}"' for literal in literals) == text
    assert all(literal.isprintable() for literal in literals)
    assert [_unescaped(literal) for literal in literals] == options


def _unescaped(literal: str) -> str:
    escapes = re.compile(r"\\(?:([\"\\])|u([0-9A-F]{4})|U([0-9A-F]{8}))")
    return escapes.sub(lambda m: m[1] or chr(int(m[2] or m[3], 16)), literal)
