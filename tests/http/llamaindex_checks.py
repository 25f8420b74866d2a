"""LlamaIndex's client of OpenAI-compatible servers."""

from __future__ import annotations

from typing import Any

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

QUESTION = "What is 17 + 25?"


class Answer(BaseModel):
    answer: int


def client(given: Any, *, is_chat: bool = True, **options: Any) -> OpenAILike:
    return OpenAILike(
        model="demo",
        api_base=given["url"] + "/v1",
        api_key="none",
        is_chat_model=is_chat,
        is_function_calling_model=is_chat,
        temperature=0,
        context_window=2048,
        max_retries=0,
        **options,
    )


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


ADDER = FunctionTool.from_defaults(add)


def check_chat(given: Any) -> None:
    asked = [ChatMessage(role="user", content=given["question"])]
    assert client(given).chat(asked).message.content == given["answer"]
    streamed = client(given).stream_chat(asked)
    assert "".join(part.delta or "" for part in streamed) == given["answer"]


def check_completion(given: Any) -> None:
    model = client(given, is_chat=False, max_tokens=20)
    assert model.complete(given["prompt"]).text == given["completion"]
    streamed = model.stream_complete(given["prompt"])
    assert "".join(part.delta or "" for part in streamed) == given["completion"]


def check_embeddings(given: Any) -> None:
    model = OpenAILikeEmbedding(
        model_name="demo", api_base=given["url"] + "/v1", api_key="none", max_retries=0
    )
    prompt = given["prompt"]
    found = [model.get_query_embedding(prompt), *model.get_text_embedding_batch([prompt] * 3)]
    for vector in found:
        assert all(abs(a - b) < 1e-5 for a, b in zip(vector, given["embedding"], strict=True))


def check_tools(given: Any) -> None:
    model = client(given)
    whole = model.chat_with_tools([ADDER], user_msg=QUESTION)
    *_, streamed = model.stream_chat_with_tools([ADDER], user_msg=QUESTION)
    for answer in (whole, streamed):
        (call,) = model.get_tool_calls_from_response(answer)
        assert (call.tool_name, call.tool_kwargs) == ("add", {"a": 17, "b": 25})
    assert model.predict_and_call([ADDER], user_msg=QUESTION).response == "42"


def check_objects(given: Any) -> None:
    asked = [ChatMessage(role="user", content=QUESTION)]
    for structured in (False, True):  # by a tool, and by a schema
        model = client(given, should_use_structured_outputs=structured)
        assert model.as_structured_llm(Answer).chat(asked).raw == Answer(answer=42), structured
