"""Chats that the client sends, over real gRPC, against a server whose tokens are known."""

from __future__ import annotations

import pytest

from nano_vllm_grpc import LLM, InvalidRequestError
from nano_vllm_grpc.pb import frontend_pb2 as pb
from tests.client.fake_server import FakeService

CHAT = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]


def test_a_chat_with_tools_is_sent(llm: LLM, service: FakeService) -> None:
    function = {"name": "f", "arguments": {"b": 1, "a": [None]}}
    calls = [{"id": "1", "type": "function", "function": function}]
    conversation = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "reasoning_content": "", "tool_calls": calls},
        {"role": "tool", "content": "b", "tool_call_id": "1", "name": "f"},
    ]
    options = {"tools": [{"type": "function"}], "chat_template_kwargs": {"enable_thinking": False}}
    answers = llm.chat([conversation, CHAT], use_tqdm=False, **options)  # type: ignore[arg-type]
    assert [answer["text"] for answer in answers] == ["bcbcbcbc", "bcdbcdbc"]
    (sent,) = [each.chat for each in service.requests if len(each.chat.messages) == 3]
    call = pb.FunctionCall(name="f", arguments='{"b": 1, "a": [null]}')
    assert sent == pb.Chat(
        messages=[
            pb.ChatMessage(role="user", content="a"),
            pb.ChatMessage(
                role="assistant",
                reasoning_content="",
                tool_calls=[pb.ToolCall(id="1", function=call)],
            ),
            pb.ChatMessage(role="tool", content="b", tool_call_id="1", name="f"),
        ],
        tools=['{"type": "function"}'],
        chat_template_kwargs='{"enable_thinking": false}',
    )
    llm.chat(CHAT, use_tqdm=False, continue_final_message=True)
    assert service.requests[-1].chat.continue_final_message


def test_content_may_be_parts_of_text(llm: LLM, service: FakeService) -> None:
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]
    llm.chat([{"role": "user", "content": parts}], use_tqdm=False)
    llm.tokenize([{"role": "user", "content": ()}])
    assert service.requests[-1].chat == pb.Chat(
        messages=[pb.ChatMessage(role="user", content="ab\nc")]
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}],
            r"content\[1\]\.type: 'image_url' is not supported; must be 'text'",
        ),
        ([{"text": "a"}], r"content\[0\]\.type: None is not supported"),
        ([{"type": "text"}], r"content\[0\]\.text: a NoneType; must be a text"),
        ([{"type": "text", "text": 1}], r"content\[0\]\.text: a int; must be a text"),
        (["a"], r"content\[0\]: a str; must be a part with a type"),
        (7, r"content: a int; must be a text or a list of parts"),
        ({"type": "text", "text": "a"}, r"content: a dict; must be a text or a list of parts"),
    ],
)
def test_other_content_is_rejected_by_name(llm: LLM, content: object, message: str) -> None:
    for call in (llm.chat, llm.tokenize):
        with pytest.raises(InvalidRequestError, match=message):
            call([{"role": "user", "content": content}])  # type: ignore[operator]
