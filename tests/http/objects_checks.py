"""What others' libraries make of the demo model's JSON: sums in the forms that they ask for."""

from __future__ import annotations

import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch prices

import litellm
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import OpenAI
from pydantic import BaseModel

QUESTION = "What is 17 + 25?"
MESSAGES: Any = [{"role": "user", "content": QUESTION}]


class Answer(BaseModel):
    answer: int


class Person(BaseModel):
    name: str
    age: int


ABOUT_JASON, JASON = "Jason is 25 years old.", Person(name="Jason", age=25)


def base(given: Any) -> str:
    return str(given["url"]) + "/v1"


def client(given: Any) -> OpenAI:
    return OpenAI(base_url=base(given), api_key="none", max_retries=0)


def check_openais_parse(given: Any) -> None:
    def parsed(question: str, form: Any) -> Any:
        parse = client(given).chat.completions.parse
        messages: Any = [{"role": "user", "content": question}]
        return parse(model="demo", messages=messages, response_format=form, temperature=0)

    assert parsed(QUESTION, Answer).choices[0].message.parsed == Answer(answer=42)
    assert parsed(ABOUT_JASON, Person).choices[0].message.parsed == JASON


def check_langchain(given: Any) -> None:
    @tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    model = ChatOpenAI(model="demo", base_url=base(given), api_key="none", temperature=0)
    for method in ("json_schema", "function_calling"):
        reader: Any = model.with_structured_output(Answer, method=method)
        assert reader.invoke(QUESTION) == Answer(answer=42), method
    asked: list[Any] = [HumanMessage(QUESTION)]
    reply: Any = model.bind_tools([add]).invoke(asked)
    assert [(call["name"], call["args"]) for call in reply.tool_calls] == [
        ("add", {"a": 17, "b": 25})
    ]
    asked += [reply, add.invoke(reply.tool_calls[0])]
    assert "42" in str(model.bind_tools([add]).invoke(asked).content)


def check_litellm(given: Any) -> None:
    asked = {"model": "openai/demo", "api_base": base(given), "api_key": "none", "temperature": 0}
    parsed: Any = litellm.completion(**asked, messages=MESSAGES, response_format=Answer)
    assert Answer.model_validate_json(parsed.choices[0].message.content) == Answer(answer=42)
