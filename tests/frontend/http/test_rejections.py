"""Every wrong value is a 400 that names the field and never quotes a prompt."""

from __future__ import annotations

from typing import Any

import pytest
from structlog.testing import capture_logs

from frontend.text.structured_output import MAX_GRAMMAR_BYTES
from shared.pb import scheduler_pb2
from tests.frontend.http.conftest import POSTS, HttpService, Json

SECRET = "zebra-quagga"
CHAT, TEXT, RESPONSES, ANTHROPIC = POSTS
BODIES: dict[str, Json] = {
    CHAT: {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 3},
    TEXT: {"prompt": SECRET, "max_tokens": 3},
    RESPONSES: {"input": SECRET, "max_output_tokens": 3},
    ANTHROPIC: {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 3},
}
NOT_NUMBERS: list[Any] = [-1, "1", True, []]
# Wrong values of the parameters that all APIs share, and the field that the error names.
SHARED: list[tuple[Json, str]] = [
    *(({name: value}, name) for name in ("temperature", "top_p", "min_p") for value in NOT_NUMBERS),
    ({"temperature": 2.5}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"min_p": 1.5}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"temperature": 1e300}, "temperature"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 2**31}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"seed": 2**64}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"seed": "1"}, "seed"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 4}, "min_tokens"),
    ({"stop": 1}, "stop"),
    ({"stop": ["a", 1]}, "stop[1]"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "x" * 1025}, "stop[0]"),
    ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]"),
    ({"stop_token_ids": [1, 1536]}, "stop_token_ids[1]"),
    ({"stop_token_ids": [2**32]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [1] * 65}, "stop_token_ids"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"logit_bias": []}, "logit_bias"),
    ({"logit_bias": {"a b": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"1536": 1}}, "logit_bias"),
    ({"logit_bias": {"4294967296": 1}}, "logit_bias"),
    ({"logit_bias": {"5": "1"}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias[5]"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"bad_words": ["hi", 1]}, "bad_words[1]"),
    ({"bad_words": ["hi", ""]}, "bad_words[1]"),
    ({"bad_words": ["x" * 1025]}, "bad_words[0]"),
    ({"bad_words": ["a"] * 129}, "bad_words"),
    ({"length_penalty": 2}, "length_penalty"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"priority": 2**31}, "priority"),
    ({"cache_salt": "x" * 257}, "cache_salt"),
    ({"engine": "x" * 257}, "engine"),
    ({"request_id": "x" * 257}, "request_id"),
    ({"request_id": "a\nb"}, "request_id"),
    ({"resume_token_ids": [1, 2, 3, 4]}, "resume_token_ids"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml"),
    ({"structured_outputs": {"json": 1}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "a", "choice": 1}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice[1]"),
    ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice[1]"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "structured_outputs"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"regex": ""}, "regex"),
    ({"ebnf": ""}, "ebnf"),
    ({"service_tier": "x"}, "service_tier"),
    ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens"),
    ({"metadata": 1}, "metadata"),
    ({"return_token_ids": 1}, "return_token_ids"),
    ({"no_such_thing": 0}, "no_such_thing"),
    ({"model": 1}, "model"),
]
BEAMS: list[tuple[Json, str]] = [
    ({"resume_token_ids": [1, 1536]}, "resume_token_ids[1]"),
    ({"resume_token_ids": [-1]}, "resume_token_ids[0]"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"n": 2, "resume_token_ids": [1]}, "resume_token_ids"),
    ({"use_beam_search": True, "n": 17}, "use_beam_search"),
    ({"use_beam_search": True, "seed": 1, "temperature": 0}, "use_beam_search"),
    ({"use_beam_search": True, "temperature": 1}, "use_beam_search"),
    ({"use_beam_search": True, "resume_token_ids": [1], "temperature": 0}, "resume_token_ids"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": []}, "stream_options"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
]


def messages(*contents: Any, **fields: Any) -> Json:
    return {"messages": [{"role": "user", "content": each, **fields} for each in contents]}


def text(value: Any) -> Json:
    return {"type": "text", "text": value}


LONG = {"description": "x" * MAX_GRAMMAR_BYTES}
LONG_SCHEMA = {"type": "json_schema", "json_schema": {"schema": LONG}}
TOOL: Json = {"type": "function", "function": {"name": "f"}}
IMAGE_RESULT = {"type": "tool_result", "content": [{"type": "image"}]}
OWN: dict[str, list[tuple[Json, str]]] = {
    CHAT: [
        *BEAMS,
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [SECRET]}, "messages[0]"),
        ({"messages": [{"content": SECRET}]}, "messages[0].role"),
        ({"messages": [{"role": SECRET, "content": ""}]}, "messages[0].role"),
        (messages(SECRET, 1), "messages[1].content"),
        (messages([text(SECRET), {"text": SECRET}]), "messages[0].content[1].type"),
        (messages([text(1)]), "messages[0].content[0].text"),
        (messages(SECRET, [{"type": "image_url", "image_url": {}}]), "messages[1].content[0]"),
        (messages("a", name=1), "messages[0].name"),
        (messages("a", tool_calls=[{"function": {}}]), "messages[0].tool_calls[0].function.name"),
        (messages("a", tool_calls=[{"function": {"name": "f"}}]), "messages[0].tool_calls"),
        (messages("a", tool_call_id="c"), "messages[0].tool_call_id"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"max_completion_tokens": "1"}, "max_completion_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "response_format"),
        ({"response_format": LONG_SCHEMA}, "response_format.json_schema"),
        ({"tools": [TOOL], "tool_choice": "required", "ignore_eos": True}, "tool_choice"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"tools": [{"type": "x", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "x"}, "tool_choice"),
        ({"chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"continue_final_message": True, **messages("")}, "continue_final_message"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"modalities": ["audio"]}, "modalities[0]"),
        ({"chat": {}}, "chat"),
        ({"structured_output": {}}, "structured_output"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
    ],
    TEXT: [
        *BEAMS,
        ({"prompt": None}, "prompt"),
        ({"prompt": 1}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1536]}, "prompt[0]"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": SECRET * 200}, "prompt"),
        ({"prompt": [1] * 128}, "prompt"),
        ({"prompt": ["a", "b"], "resume_token_ids": [1]}, "resume_token_ids"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"echo": 1}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"text": "a"}, "text"),
        ({"token_ids": [1]}, "token_ids"),
        ({"beam_width": 2}, "beam_width"),
        ({"use_beam_search": True, "n": 0, "temperature": 0}, "n"),
    ],
    RESPONSES: [
        ({"input": None}, "input"),
        ({"input": 1}, "input"),
        ({"input": messages([{"type": "input_image"}])["messages"]}, "input[0].content[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": 1}]}, "input[0].role"),
        ({"instructions": 1}, "instructions"),
        ({"text": {"format": {"type": "json_schema", "schema": LONG}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object"}}, "ignore_eos": True}, "text.format"),
        ({"max_output_tokens": "1"}, "max_output_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": []}, "input"),
        ({"input": [{"role": "x", "content": "a"}]}, "input[0].role"),
        ({"input": "a " * 500}, "input"),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs"),
        ({"text": 1}, "text"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
    ],
    ANTHROPIC: [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        (messages(SECRET, None), "messages[1].content"),
        (messages([{"type": "image", "source": {}}]), "messages[0].content[0]"),
        (messages([IMAGE_RESULT]), "messages[0].content[0].content"),
        ({"system": [text(1)]}, "system[0].text"),
        ({"tools": [{"name": "f", "type": "bash_20250124"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"thinking": {"type": "x"}}, "thinking.type"),
    ],
}  # fmt: skip


async def named(service: HttpService, path: str, wrong: Json) -> str:
    """The field that the error of a request names."""
    status, body = await service.error(path, {**BODIES[path], **wrong})
    assert status == 400, (wrong, body)
    error, param = body["error"], ""
    assert error["type"] == "invalid_request_error"
    assert SECRET not in str(body), wrong
    if path == ANTHROPIC:
        assert body.keys() == {"type", "error"}
        assert error.keys() == {"type", "message"}
        return str(error["message"].partition(": ")[0])
    assert body.keys() == {"error"}
    assert error.keys() == {"message", "type", "param", "code"}
    param = error["param"]
    assert error["message"].startswith(f"{param}: ")
    return str(param)


@pytest.mark.parametrize("path", POSTS)
async def test_every_wrong_value_is_an_error_that_names_its_field(
    service: HttpService, path: str
) -> None:
    cases = SHARED + OWN[path]
    if path == ANTHROPIC:  # whose name for them is stop_sequences
        cases = [case for case in cases if "stop" not in case[0]]
    found = [(wrong, await named(service, path, wrong)) for wrong, _ in cases]
    assert found == cases
    assert service.scheduler.submits.empty()
    await service.post(path, BODIES[path])


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("content", [b"", b"null", b"[]", b'"a"', b"{", b"\xff", b"[" * 5000])
async def test_a_body_must_be_a_json_object(
    service: HttpService, path: str, content: bytes
) -> None:
    response = await service.http.post(path, content=content)
    assert response.status_code == 400
    assert "body: " in response.json()["error"]["message"]


DEEP: Json = {}
for _ in range(300):  # orjson reads 1,024 levels, and writes 254
    DEEP = {"a": DEEP}
NESTED: list[tuple[str, Json]] = [
    (TEXT, {"structured_outputs": {"json": DEEP}}),
    (TEXT, {"response_format": {"type": "json_schema", "json_schema": {"schema": DEEP}}}),
    (TEXT, {"response_format": {"type": "structural_tag", "format": DEEP}}),
    (CHAT, {"chat_template_kwargs": DEEP}),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "parameters": DEEP}}]}),
    (
        CHAT,
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": DEEP}}],
                }
            ]
        },
    ),
    (ANTHROPIC, {"tools": [{"name": "f", "input_schema": DEEP}]}),
    (
        ANTHROPIC,
        {
            "messages": [
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "c", "name": "f", "input": DEEP}],
                }
            ]
        },
    ),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "schema": DEEP}}}),
    (RESPONSES, {"tools": [{"type": "function", "name": "f", "parameters": DEEP}]}),
    (RESPONSES, {"metadata": DEEP}),
]


@pytest.mark.parametrize(("path", "body"), NESTED)
async def test_json_that_nests_too_deep_is_an_error(
    service: HttpService, path: str, body: Json
) -> None:
    with capture_logs():  # rendering such a value takes seconds
        assert (await service.error(path, {**BODIES[path], **body}))[0] == 400


async def test_echo_takes_no_negative_length(service: HttpService) -> None:
    assert await named(service, TEXT, {"max_tokens": -1, "echo": True}) == "max_tokens"


async def test_a_biased_token_id_of_thousands_of_digits_is_an_error(service: HttpService) -> None:
    assert await named(service, TEXT, {"logit_bias": {"1" * 5000: 1}}) == "logit_bias"


@pytest.mark.parametrize("name", ["return_token_ids", "prompt_logprobs"])
async def test_anthropics_api_rejects_what_it_cannot_show(service: HttpService, name: str) -> None:
    value = 1 if name == "prompt_logprobs" else True
    assert await named(service, ANTHROPIC, {name: value}) == name


async def test_an_invalid_request_of_the_engine_is_named(service: HttpService) -> None:
    service.scheduler.rejection = scheduler_pb2.Finished(
        cause=scheduler_pb2.FINISH_CAUSE_INVALID,
        field="sampling.structured_output.regex",
        message="does not compile",
    )
    status, body = await service.error(TEXT, {**BODIES[TEXT], "structured_outputs": {"regex": "("}})
    assert status == 400
    assert body["error"]["param"] == "structured_outputs.regex"
    assert body["error"]["message"] == "structured_outputs.regex: does not compile"
