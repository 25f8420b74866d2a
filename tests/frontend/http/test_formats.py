"""Answers are split by the rules of reasoning and of each format of calls."""

from __future__ import annotations

import pytest

from frontend.http.formats.parser import (
    CallArguments,
    CallBegin,
    Content,
    Event,
    Reasoning,
)
from frontend.http.formats.tool_format import ToolFormat, reasons, tool_format
from tests.frontend.http.answers import (
    ADD,
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
    content,
    whole,
)


@pytest.mark.parametrize(
    ("text", "begun", "may_begin"),
    [
        ("a</think>b", [Reasoning("a"), Content("b")], [Content("a</think>b")]),
        ("<think>a</think>b", [Reasoning("a"), Content("b")], None),
        (" \n<think>\n\na\n\nb\n\n</think>\n\n c\n", [Reasoning("a\n\nb"), Content(" c\n")], None),
        (
            "\n\n a\n </think> \n",
            [Reasoning(" a\n "), Content(" \n")],
            [Content("\n\n a\n </think> \n")],
        ),
        ("<think>\n\n</think>\n\nb", [Content("b")], None),
        ("<think>", [], None),
        ("<think>\n\n", [], None),
        ("<think>a\n", [Reasoning("a\n")], None),
        ("<think>a</thin", [Reasoning("a</thin")], None),
        ("<think>a<think>b</think>c<think>", [Reasoning("a<think>b"), Content("c<think>")], None),
        ("<think>a</think>b</think>", [Reasoning("a"), Content("b</think>")], None),
        (" <thin", [Reasoning(" <thin")], [Content(" <thin")]),
        ("a<think>b</think>", [Reasoning("a<think>b")], [Content("a<think>b</think>")]),
        ("\n\n", [], [Content("\n\n")]),
        ("", [], []),
    ],
)
@pytest.mark.parametrize("tools", TOOLS)
def test_reasoning(
    text: str, begun: list[Event], may_begin: list[Event] | None, tools: ToolFormat | None
) -> None:
    assert whole(text, tools, "begun") == begun
    assert whole(text, tools, "may_begin") == (begun if may_begin is None else may_begin)
    assert whole(text, tools) == content(text)


@pytest.mark.parametrize(
    ("tools", "call"),
    [
        (HERMES, CALL),
        (LLAMA, LLAMA_CALL),
        (LLAMA, TAG + LLAMA_CALL),
        (DEEPSEEK, f"{CALLS}{V3_CALL}{CALLS_END}"),
        (MISTRAL, f"[TOOL_CALLS][{LISTED}]"),
        (MISTRAL_11, MISTRAL_CALL),
        (PHI, f"{PHI_BEGIN}[{LISTED}]{PHI_END}"),
    ],
)
def test_calls_follow_on_reasoning_and_are_none_within(tools: ToolFormat, call: str) -> None:
    thought = f"a {call}"
    events = whole(f"<think>\n{thought}\n</think>\n\n{call}", tools, "may_begin")
    assert events == [Reasoning(thought), *ADD]
    assert whole(call, tools, "begun") == [Reasoning(call)]


@pytest.mark.parametrize(
    ("text", "events"),
    [
        (CALL, ADD),
        (f" \n{CALL}\n {CALL}\n\n", ADD + ADD),
        (f"a\n\n{CALL}", [Content("a"), *ADD]),
        (f"{CALL}\n b \n", [*ADD, Content("\n b \n")]),
        (f"a {CALL} b {CALL} ", [Content("a"), *ADD, Content(" b"), *ADD]),
        ("a \n", content("a \n")),
        (" \n", content(" \n")),
        ("a <tool_cal", content("a <tool_cal")),
        (CALL.replace("\n", ""), ADD),
        # Keys in any order, of any kind.
        ('<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', ADD),
        ('<tool_call>{"parameters":{"a": 1},"name":"add"}', ADD),
        (
            '<tool_call>{"id": [1, "]", {}], "b": {"}": 2}, "c": "\\"", "d": -1.5e3, "e": null,'
            ' "name": "add", "f": true, "arguments": {"a": 1}, "g": {"name": 1}}</tool_call>',
            ADD,
        ),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}, "parameters": {"b": 2}}', ADD),
        # Raw arguments.
        (
            '<tool_call>{"name": "f", "arguments": { "a" :\n"}\\"{\\\\" , "b": [{}]}}</tool_call>',
            [CallBegin("f"), CallArguments('{ "a" :\n"}\\"{\\\\" , "b": [{}]}')],
        ),
        ('<tool_call>{"name": "f", "arguments": {"a": </tool_call>', None),
        ('<tool_call>{"name": "f", "arguments": {"a": "</tool_call>', None),
        # Without arguments.
        ('<tool_call>{"name": "f"}</tool_call>', "{}"),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "{}"),
        ('<tool_call>{"arguments": null, "name": "f", "parameters": {"a": 1}}', '{"a": 1}'),
        ('<tool_call>{"name": "f", "arguments": ""}</tool_call>', "{}"),
        # As a string.
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\\u00e9\\"}"}', '{"a": "é"}'),
        ('<tool_call>{"arguments": "{}", "name": "f"}', "{}"),
        # Names.
        (
            '<tool_call>{"name": "\\u00e9\\"", "arguments": {}}',
            [CallBegin('é"'), CallArguments("{}")],
        ),
        # Several in one pair of marks, and a list.
        (f"<tool_call>{LLAMA_CALL}\n{LLAMA_CALL}</tool_call>b", [*ADD, *ADD, Content("b")]),
        (f"<tool_call>\n[{LLAMA_CALL}, {LLAMA_CALL}]\n</tool_call>\n", ADD + ADD),
        (f"<tool_call>[ {LLAMA_CALL} ]", ADD),
        # Without the end mark, or the last brace.
        (f"<tool_call>{LLAMA_CALL}\n{CALL}", ADD + ADD),
        (f"<tool_call>{LLAMA_CALL} b", [*ADD, Content(" b")]),
        (f"<tool_call>{LLAMA_CALL[:-1]}\n</tool_call>b", [*ADD, Content("b")]),
        (f"<tool_call>{LLAMA_CALL[:-1]}\nb", [*ADD, Content("\nb")]),
        (f'<tool_call>{LLAMA_CALL[:-1]}, "id": "x', ADD),
        (f"<tool_call>{LLAMA_CALL}\n</tool_", [*ADD, Content("\n</tool_")]),
    ],
)
def test_calls_of_hermes(text: str, events: list[Event] | str | None) -> None:
    if events is None:
        events = text.partition('"arguments": ')[2]
    if isinstance(events, str):
        events = [CallBegin("f"), CallArguments(events)]
    assert whole(text, HERMES) == events


@pytest.mark.parametrize(
    "rest",
    [
        "",
        "\n",
        "a",
        "</tool_call>",
        "{}</tool_call>",
        "[]</tool_call>",
        "[{}]",
        "{a",
        '{"name": ""}',
        '{"name": 1}',
        '{"name": "add',
        '{"name": "add"',
        '{"name": "add", "arguments": ',
        '{"name": "add", "arguments": ""',
        '{"name": "add", "arguments": [{"a": 1}]}',
        '{"name": "add", "arguments": 1}',
        '{"name": "add", "arguments": true}',
        '{"name": "add", "arguments": nil}',
        '{"name": "add", "arguments": "\\x"}',
        '{"name": "\\ud800", "arguments": {}}',
        '{"name": "add", "arguments": "\\ud800"}',
        '{"name" "add"}',
        '{"name": "add",}',
        '{"arguments": {"a": 1}}',
        '{"arguments": {"a": 1}, "name": "ad',
        '{"arguments": {"a": "<tool_call>{}</tool_call>"}}',
    ],
)
def test_malformed_calls_are_content_and_later_ones_count(rest: str) -> None:
    text = f"a \n<tool_call> {rest}"
    assert whole(text, HERMES) == content(text)
    ended = rest.count('"') % 2 == 0
    if ended:
        assert whole(f"{text}\n {CALL}", HERMES) == [Content(text.rstrip()), *ADD]
        assert whole(f"{CALL}\n{text}", HERMES) == [*ADD, Content(f"\n{text}")]


@pytest.mark.parametrize(
    ("text", "events"),
    [
        (LLAMA_CALL, ADD),
        (f"\n {LLAMA_CALL} \n", ADD),
        (f" {TAG} {LLAMA_CALL}", ADD),
        ('{"type": "function", "name": "add", "arguments": {"a": 1}}', ADD),
        (f"{LLAMA_CALL}; {LLAMA_CALL},{LLAMA_CALL}\n{LLAMA_CALL}{LLAMA_CALL}", ADD * 5),
        (f"{LLAMA_CALL};\n{TAG}{LLAMA_CALL}", ADD + ADD),
        (f"a {LLAMA_CALL}", content(f"a {LLAMA_CALL}")),
        (f"a\n{TAG}{LLAMA_CALL}", [Content("a"), *ADD]),
        (f"a {TAG}b {TAG}{LLAMA_CALL}", [Content(f"a {TAG}b"), *ADD]),
        (f"{LLAMA_CALL}; b", [*ADD, Content("; b")]),
        (f"{LLAMA_CALL} b {LLAMA_CALL}", [*ADD, Content(f" b {LLAMA_CALL}")]),
        ('{"a": 1} b', content('{"a": 1} b')),
        (f'{LLAMA_CALL} {{"a": 1}} b', [*ADD, Content(' {"a": 1} b')]),
        (TAG, []),
        (f"a {TAG} ", content("a  ")),
        (f"{LLAMA_CALL}\n{TAG}\n", ADD),
        (f"{TAG}print(1)", content(f"{TAG}print(1)")),
        (f'{TAG}{{"name"', content(f'{TAG}{{"name"')),
        (f"{TAG}[1]", content(f"{TAG}[1]")),
        (f"[{LLAMA_CALL}]", content(f"[{LLAMA_CALL}]")),
        (" \n", content(" \n")),
    ],
)
def test_calls_of_llama(text: str, events: list[Event]) -> None:
    assert whole(text, LLAMA) == events


@pytest.mark.parametrize(
    ("text", "events"),
    [
        (f"{CALLS}{V3_CALL}{CALLS_END}", ADD),
        (f"a\n\n{CALLS}{V3_CALL}\n{V3_CALL}{CALLS_END}\n", [Content("a"), *ADD, *ADD]),
        (f"{CALLS}{V31_CALL}{V31_CALL}{CALLS_END} b", [*ADD, *ADD, Content(" b")]),
        (f"{CALLS}\n{ONE}function{SEP}{{}}{ONE_END}", [CallBegin("function"), CallArguments("{}")]),
        (f"{CALLS}{V31_CALL.replace(ONE_END, '')}\n{CALLS_END}", ADD),
        (f"{CALLS}{V3_CALL}\n{CALLS}{V3_CALL}", ADD + ADD),
        (f"{CALLS}{V3_CALL.partition(ONE_END)[0]}", ADD),
        (f'{CALLS}{ONE}add{SEP}{{"a": 1', [CallBegin("add"), CallArguments('{"a": 1')]),
        (
            f'{CALLS}{ONE}add{SEP}{{"a": "{ONE_END}"}}{ONE_END}',
            [CallBegin("add"), CallArguments(f'{{"a": "{ONE_END}"}}')],
        ),
        (f"{CALLS}{V3_CALL}{ONE}b{CALLS_END}", [*ADD, Content(f"{ONE}b{CALLS_END}")]),
        (f"{CALLS}{V3_CALL}{ONE}{CALLS_END}", [*ADD, Content(f"{ONE}{CALLS_END}")]),
    ],
)
def test_calls_of_deepseek(text: str, events: list[Event]) -> None:
    assert whole(text, DEEPSEEK) == events


@pytest.mark.parametrize(
    "text",
    [
        f"a {CALLS}",
        f"{CALLS}{CALLS_END}",
        f"{CALLS}b",
        V3_CALL,
        f"{CALLS}{ONE}add",
        f"{CALLS}{ONE}add{SEP}",
        f"{CALLS}{ONE}{SEP}{{}}",
        f"{CALLS}{ONE}add{SEP}[]{ONE_END}{CALLS_END}",
        f"{CALLS}{ONE}other{SEP}add\n```json\n{{}}\n```{ONE_END}",
        f"{CALLS}{ONE}function{SEP}\n```json\n{{}}\n```{ONE_END}",
        f"{CALLS}{ONE}function{SEP}add\n```python\n{{}}\n```{ONE_END}",
        f"{CALLS}{ONE}function{SEP}add\n```json\n1",
    ],
)
def test_malformed_calls_of_deepseek_are_content(text: str) -> None:
    assert whole(text, DEEPSEEK) == content(text)
    events = [Content(text), *ADD]
    assert whole(f"{text}\n{CALLS}{V31_CALL}{CALLS_END}", DEEPSEEK) == events


@pytest.mark.parametrize("form", [MISTRAL, MISTRAL_11])
@pytest.mark.parametrize(
    ("text", "events"),
    [
        (f"[TOOL_CALLS] [{LISTED}]", ADD),
        (f"[TOOL_CALLS][{LISTED}, {LISTED}]", ADD + ADD),
        (f"a\n[TOOL_CALLS][{LISTED}] b", [Content("a"), *ADD, Content(" b")]),
        (f"[TOOL_CALLS]{LISTED}", ADD),
        (f"[TOOL_CALLS][{LISTED}][TOOL_CALLS][{LISTED}]", ADD + ADD),
        (f"[TOOL_CALLS][{LISTED}", ADD),
        (MISTRAL_CALL, ADD),
        (f"a {MISTRAL_CALL}{MISTRAL_CALL}", [Content("a"), *ADD, *ADD]),
        ('[TOOL_CALLS]add{"a": 1}', ADD),
        ('[TOOL_CALLS] add [CALL_ID]a1b2[ARGS] {"a": 1}\n', ADD),
        (f"{MISTRAL_CALL} b", [*ADD, Content(" b")]),
        ('[TOOL_CALLS]add[ARGS]{"a": 1', [CallBegin("add"), CallArguments('{"a": 1')]),
        *((text, content(text)) for text in ("[TOOL_CALLS]", "[TOOL_CALLS]add", "[TOOL_CALLS][]")),
        ("[TOOL_CALLS]add[ARGS][1]", content("[TOOL_CALLS]add[ARGS][1]")),
        ("[TOOL_CALLS][ARGS]{}", content("[TOOL_CALLS][ARGS]{}")),
        ("[TOOL_CALLS]add[ARGS]", content("[TOOL_CALLS]add[ARGS]")),
        (f"[TOOL_CALLS][1] {MISTRAL_CALL}", [Content("[TOOL_CALLS][1]"), *ADD]),
    ],
)
def test_calls_of_mistral(form: ToolFormat, text: str, events: list[Event]) -> None:
    assert whole(text, form) == events


@pytest.mark.parametrize(
    ("text", "events"),
    [
        (f"{PHI_BEGIN}[{LISTED}, {LISTED}]{PHI_END}", ADD + ADD),
        (f"a {PHI_BEGIN}{LISTED}{PHI_END} b", [Content("a"), *ADD, Content(" b")]),
        (f"{PHI_BEGIN}[]{PHI_END}", content(f"{PHI_BEGIN}[]{PHI_END}")),
    ],
)
def test_calls_of_phi(text: str, events: list[Event]) -> None:
    assert whole(text, PHI) == events


@pytest.mark.parametrize(
    ("template", "tools", "may_reason"),
    [
        (f"{{{{ '{CALLS}<tool_call></think>' }}}}", DEEPSEEK, True),
        ("<|im_start|> <tool_call> <|python_tag|>", HERMES, False),
        ("<|python_tag|> <|im_start|>", LLAMA, False),
        ("<|im_start|>assistant\n<think>\n", HERMES, True),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS] [ARGS]", MISTRAL_11, False),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", MISTRAL, False),
        ("<|tool|> <|/tool|>", PHI, False),
        ("", HERMES, False),
    ],
)
def test_a_chat_template_shows_the_formats(
    template: str, tools: ToolFormat, may_reason: bool
) -> None:
    assert tool_format(template) is tools
    assert reasons(template) is may_reason
