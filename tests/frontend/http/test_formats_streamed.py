"""Answers in pieces: no cut changes what they are split into, and no text is slow."""

from __future__ import annotations

import itertools
import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.http.formats.parser import (
    AnswerParser,
    CallArguments,
    CallBegin,
    Content,
    Event,
    Reasoning,
)
from frontend.http.formats.tool_format import ToolFormat
from tests.frontend.http.answers import (
    ADD,
    BEGINS,
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
    MISTRAL_CALLS,
    ONE,
    ONE_END,
    PHI,
    PHI_BEGIN,
    PHI_END,
    SEP,
    TAG,
    TOOLS,
    V3_CALL,
    V31_CALL,
    Begins,
    content,
    parse,
)


def streamed(text: str, tools: ToolFormat | None, reasoning: Begins = "none") -> list[list[Event]]:
    """The events of each character."""
    parser = AnswerParser(reasoning=reasoning, tools=tools)
    return [parser.feed(character) for character in text]


def test_what_is_certain_is_not_held_back() -> None:
    *_, begin = streamed('<tool_call>{"name": "f", "arguments": {', HERMES)
    assert begin == [CallBegin("f"), CallArguments("{")]
    *_, key, end, after = streamed('<tool_call>{"name": "f", "arguments": {"}}', HERMES)
    assert (key, end, after) == ([CallArguments('"')], [CallArguments("}")], [CallArguments("}")])
    *_, begin = streamed('<tool_call>{"arguments": {"a": 1}, "name": "add"', HERMES)
    assert begin == ADD
    assert streamed("a< b", HERMES) == [[Content("a")], [], [Content("<")], [Content(" b")]]
    assert streamed("a \n", None) == [[Content("a")], [Content(" ")], [Content("\n")]]
    assert streamed("</", None, "begun") == [[], []]
    assert streamed("a\n", None, "begun") == [[Reasoning("a")], []]
    assert streamed("{a", LLAMA) == [[], [Content("{a")]]
    assert streamed("a{", LLAMA) == [[Content("a")], [Content("{")]]


PIECES = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", TAG, CALL, LLAMA_CALL, V3_CALL),
    *(V31_CALL, CALLS, CALLS_END, ONE, SEP, ONE_END, "function", "add", "```json", "```", "\n"),
    *(" ", "\n\n", "a", "é", "<", ">", "|", "{", "}", "[", "]", ",", ":", ";", '"', "\\", "\\u"),
    *('"name"', '"arguments"', '"parameters"', '"id"', '"f"', "null", "1", "{}", '""', '"{}"'),
    *(CALLS + V3_CALL, f"{CALLS}{ONE}f{SEP}{{", f"{CALLS}{ONE}function{SEP}f\n```json\n"),
    *(LISTED, MISTRAL_CALL, MISTRAL_CALLS, "[ARGS]", "[CALL_ID]", PHI_BEGIN, PHI_END),
    *('{"name": "f", "arguments": {', '{"arguments": {}, "name":', "\\ud800", '"\\u00e9"'),
]


@st.composite
def texts(draw: st.DrawFn) -> str:
    """Draws texts of marks and JSON, and of parts of them."""
    text = ""
    for piece in draw(st.lists(st.sampled_from(PIECES), max_size=12)):
        begin, end = 0, len(piece)
        if draw(st.integers(0, 4)) == 4:
            begin = draw(st.integers(0, len(piece)))
            end = draw(st.integers(begin, len(piece)))
        text += piece[begin:end]
    return text


@given(text=texts(), cuts=st.lists(st.integers(0, 500), max_size=8))
@pytest.mark.parametrize("reasoning", BEGINS)
@pytest.mark.parametrize("tools", TOOLS)
def test_no_cut_changes_the_events(
    tools: ToolFormat | None, reasoning: Begins, text: str, cuts: list[int]
) -> None:
    events = parse([text], reasoning, tools)
    for cut in range(len(text) + 1):
        assert parse([text[:cut], text[cut:]], reasoning, tools) == events
    assert parse(text, reasoning, tools) == events
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    assert parse([text[a:b] for a, b in itertools.pairwise(bounds)], reasoning, tools) == events


@given(text=texts())
def test_without_formats_all_is_content(text: str) -> None:
    assert parse([text], "none", None) == content(text)


@given(text=texts())
@pytest.mark.parametrize("tools", TOOLS)
def test_without_calls_no_character_is_lost(tools: ToolFormat | None, text: str) -> None:
    events = parse([text], "none", tools)
    if not any(isinstance(event, CallBegin) for event in events):
        kept = text.replace(TAG, "") if tools is LLAMA else text
        given_back = "".join(event.text for event in events if isinstance(event, Content))
        assert (given_back.replace(TAG, "") if tools is LLAMA else given_back) == kept


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)
WRITTEN = st.tuples(
    st.text(min_size=1),
    st.dictionaries(st.text(), JSON, max_size=3),
    st.sampled_from([None, 2]),  # indentation
    st.booleans(),
)


@given(thought=st.text("ab \n<", max_size=9), before=st.text("ab \n<{", max_size=9), data=st.data())
@pytest.mark.parametrize("tools", ToolFormat)
def test_what_a_model_writes_is_read(
    tools: ToolFormat, thought: str, before: str, data: st.DataObject
) -> None:
    calls = data.draw(st.lists(WRITTEN, min_size=1, max_size=3))
    expected: list[Event] = []
    written = []
    for name, values, indent, ascii_only in calls:
        name = name if tools not in (DEEPSEEK, MISTRAL_11) else "get_time"
        arguments = json.dumps(values, indent=indent, ensure_ascii=ascii_only)
        expected += [CallBegin(name), CallArguments(arguments)]
        if tools is DEEPSEEK:
            written.append(f"{ONE}function{SEP}{name}\n```json\n{arguments}\n```{ONE_END}")
        elif tools is MISTRAL_11:
            written.append(f"{MISTRAL_CALLS}{name}[ARGS]{arguments}")
        else:
            written.append(f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}')
    if tools is HERMES:
        text = "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in written)
    elif tools is LLAMA:
        text = TAG + "; ".join(written)
    elif tools is MISTRAL:
        text = f"{MISTRAL_CALLS} [{', '.join(written)}]"
    elif tools is PHI:
        text = f"{PHI_BEGIN}[{', '.join(written)}]{PHI_END}"
    elif tools is MISTRAL_11:
        text = "".join(written)
    else:
        text = CALLS + "\n".join(written) + CALLS_END
    events = parse(f"<think>\n{thought}\n</think>\n\n{before}{text}", "may_begin", tools)
    thoughts = [Reasoning(thought.strip("\n"))] if thought.strip("\n") else []
    assert events == [*thoughts, *content(before.lstrip("\n").rstrip()), *expected]


@pytest.mark.parametrize("tools", TOOLS)
@pytest.mark.parametrize(
    ("begin", "repeated"),
    [
        ("", "<"),
        ("", "\n"),
        ("", "<tool_call>"),
        ("", '<tool_call>{"name":'),
        ("", '<tool_call>{"name":"f","arguments":{}}'),
        ("", TAG),
        ("", TAG + '{"a":{'),
        ("", CALLS + ONE),
        (f"{CALLS}{ONE}", "a"),
        (f"{CALLS}{ONE}f{SEP}{{", "{"),
        ("<tool_call>", '{"name":'),
        ("<tool_call>", "\n"),
        ('<tool_call>{"arguments":', '{"name":'),
        ('<tool_call>{"arguments":{"', "\\\\"),
        ('<tool_call>{"name":"f","arguments":{"', "<tool_call>"),
        ("{", '"a":[],'),
        ("<think>", "\n"),
        ("<think>", "</think"),
    ],
)
def test_hostile_texts_take_linear_time(
    begin: str, repeated: str, tools: ToolFormat | None
) -> None:
    text = begin + repeated * (200_000 // len(repeated))
    pieces = [text[at : at + 1000] for at in range(0, len(text), 1000)]
    assert parse(pieces, "may_begin", tools) == parse([text], "may_begin", tools)

    steps = [num_steps(begin + repeated * (size // len(repeated)), tools) for size in (1500, 3000)]
    assert steps[1] < 2.1 * steps[0]


def num_steps(text: str, tools: ToolFormat | None) -> int:
    """The number of functions called while an answer is parsed by the character."""
    parser = AnswerParser(reasoning="may_begin", tools=tools)
    called: list[str] = []
    sys.setprofile(lambda _frame, event, _argument: called.append(event))
    try:
        for character in text:
            parser.feed(character)
        parser.finish()
    finally:
        sys.setprofile(None)
    return sum(event.endswith("call") for event in called)
