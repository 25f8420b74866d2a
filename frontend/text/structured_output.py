"""Checks a completion's constraint, as far as that is possible without a grammar compiler.

Only the scheduler can tell whether a schema, a regular expression or a grammar compiles.
"""

from __future__ import annotations

from collections.abc import Sequence

from frontend.text.json_text import parse_json
from nano_vllm_grpc.pb import frontend_pb2 as pb
from shared.errors import InvalidArgumentError
from shared.sampling_params import Grammar, GrammarKind

MAX_GRAMMAR_BYTES = 64 << 10
MAX_CHOICES = 1024

_FIELD = "sampling.structured_output"
_KINDS = {
    "json_schema": GrammarKind.JSON_SCHEMA,
    "regex": GrammarKind.REGEX,
    "grammar": GrammarKind.EBNF,
    "structural_tag": GrammarKind.STRUCTURAL_TAG,
}


def check_structured_output(message: pb.StructuredOutput) -> Grammar:
    """Checks a constraint and translates it into a grammar.

    Raises:
        InvalidArgumentError: no kind is given, a text is empty or too long, a schema is not JSON.
    """
    kind = message.WhichOneof("kind")
    if kind is None:
        names = ", ".join(message.DESCRIPTOR.fields_by_name)
        raise InvalidArgumentError(_FIELD, f"empty; give one of {names}")
    field = f"{_FIELD}.{kind}"
    if kind == "json_object":
        if not message.json_object:
            raise InvalidArgumentError(field, "false; must be true")
        return Grammar(GrammarKind.JSON)
    if kind == "choice":
        return Grammar(GrammarKind.EBNF, _choice_grammar(field, message.choice.options))
    text: str = getattr(message, kind)
    size = len(text.encode())
    if not 0 < size <= MAX_GRAMMAR_BYTES:
        raise InvalidArgumentError(field, f"{size} bytes; must be 1 to {MAX_GRAMMAR_BYTES}")
    if kind in ("json_schema", "structural_tag"):
        parse_json(field, text)
    return Grammar(_KINDS[kind], text)


def _choice_grammar(field: str, options: Sequence[str]) -> str:
    """EBNF that matches exactly one of `options`."""
    if not 0 < len(options) <= MAX_CHOICES:
        raise InvalidArgumentError(
            f"{field}.options", f"{len(options)} given; must be 1 to {MAX_CHOICES}"
        )
    num_characters = 0
    for index, option in enumerate(options):
        if not option:
            raise InvalidArgumentError(
                f"{field}.options[{index}]", "empty; must have at least one character"
            )
        num_characters += len(option)
    if num_characters > MAX_GRAMMAR_BYTES:  # before the grammar is made
        raise InvalidArgumentError(
            f"{field}.options", f"{num_characters} characters; the limit is {MAX_GRAMMAR_BYTES}"
        )
    grammar = "root ::= " + " | ".join(f'"{_escaped(option)}"' for option in options)
    size = len(grammar.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidArgumentError(
            f"{field}.options", f"{size} bytes as a grammar; the limit is {MAX_GRAMMAR_BYTES}"
        )
    return grammar


def _escaped(text: str) -> str:
    """Escapes `text` for an EBNF literal, without the quotes around it."""
    return "".join(map(_escaped_character, text))


def _escaped_character(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    if character.isprintable():
        return character
    code = ord(character)
    return f"\\u{code:04X}" if code <= 0xFFFF else f"\\U{code:08X}"
