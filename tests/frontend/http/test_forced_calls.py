"""Grammars that force calls compile in the scheduler, and the parser reads the calls they allow."""

from __future__ import annotations

import json
from typing import Any

import pytest

from frontend.http.formats.parser import CallArguments, CallBegin, Event
from frontend.http.formats.tool_format import ToolFormat, forced_calls
from scheduler_svc.grammar.compiler import Matcher, compile_grammar, make_compilers
from scheduler_svc.grammar.errors import GrammarError
from shared.sampling_params import GrammarKind
from shared.vocabulary import Vocabulary
from tests.frontend.http.answers import (
    CALL,
    CALLS,
    CALLS_END,
    DEEPSEEK,
    HERMES,
    LISTED,
    LLAMA,
    LLAMA_CALL,
    MISTRAL,
    MISTRAL_11,
    MISTRAL_CALL,
    PHI,
    TAG,
    V3_CALL,
    whole,
)

END = 256
BYTES = Vocabulary({byte: bytes([byte]) for byte in range(256)} | {END: b""})
COMPILERS = make_compilers(BYTES, 20)
NUMBER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FUNCTIONS: list[tuple[str, dict[str, Any] | None]] = [("add", NUMBER), ("now", None)]
ADD: list[Event] = [CallBegin("add"), CallArguments('{"a": 1}')]


def allows(tag: dict[str, Any], text: str) -> bool:
    """Whether `text` matches the tag from beginning to end."""
    compiled = compile_grammar(COMPILERS, GrammarKind.STRUCTURAL_TAG, json.dumps(tag))
    matcher = Matcher(compiled, {END})
    try:
        for token in [*text.encode(), END]:
            matcher.accept(token)
    except GrammarError:
        return False
    return True


@pytest.mark.parametrize(
    ("form", "call", "separator", "begin", "end"),
    [
        (HERMES, CALL, "\n", "", ""),
        (LLAMA, LLAMA_CALL, "; ", "", ""),
        (DEEPSEEK, V3_CALL, "\n", CALLS, CALLS_END),
        (MISTRAL, LISTED, ", ", "[TOOL_CALLS][", "]"),
        (MISTRAL_11, MISTRAL_CALL, "", "", ""),
        (PHI, LISTED, ", ", "<|tool_call|>[", "]<|/tool_call|>"),
    ],
)
def test_only_calls_that_the_parser_reads_are_allowed(
    form: ToolFormat, call: str, separator: str, begin: str, end: str
) -> None:
    one, several = (forced_calls(form, FUNCTIONS, parallel=many) for many in (False, True))
    text, twice = f"{begin}{call}{end}", f"{begin}{call}{separator}{call}{end}"
    assert allows(one, text)
    assert allows(several, text)
    assert whole(text, form) == ADD
    assert allows(several, twice)
    assert whole(twice, form) == ADD + ADD
    assert not allows(one, twice)

    now = text.replace("add", "now")
    for arguments in ("{}", '{"b": [{}]}'):
        other = now.replace('{"a": 1}', arguments)
        assert allows(one, other)
        assert whole(other, form) == [CallBegin("now"), CallArguments(arguments)]

    wrong = [
        text.replace("add", "sub"),
        text.replace('{"a": 1}', "{}"),
        f"{begin}{end}",
        f" {text}",
    ]
    wrong += [now.replace('{"a": 1}', "[]"), f"{text} and", call[:-1], f"{TAG}{text}", ""]
    for each in wrong:
        assert not allows(several, each), each


def test_a_name_is_written_as_json() -> None:
    tag = forced_calls(HERMES, [('é"', None)], parallel=False)
    text = '<tool_call>\n{"name": "\\u00e9\\"", "arguments": {}}\n</tool_call>'
    assert allows(tag, text)
    assert whole(text, HERMES) == [CallBegin('é"'), CallArguments("{}")]
