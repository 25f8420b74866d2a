"""Others' libraries read the demo model's JSON: objects and calls in the forms that they ask
for."""

from __future__ import annotations

import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch prices

import instructor
import litellm
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from openai import OpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

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


def check_instructor(given: Any) -> None:
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        create: Any = instructor.from_openai(client(given), mode=mode).create
        asked: Any = {"model": "demo", "temperature": 0, "max_retries": 0}
        # What it returns has the response besides, so that it equals nothing.
        assert create(**asked, messages=MESSAGES, response_model=Answer).answer == 42, mode
        about: Any = [{"role": "user", "content": ABOUT_JASON}]
        person = create(**asked, messages=about, response_model=Person)
        assert (person.name, person.age) == (JASON.name, JASON.age), mode


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def check_langchains_embeddings(given: Any) -> None:
    """They are asked for with the tokens of OpenAI's models unless this is turned off."""
    model = OpenAIEmbeddings(
        model="demo",
        base_url=base(given),
        api_key="none",
        max_retries=0,
        check_embedding_ctx_length=False,
    )
    found = [model.embed_query(given["prompt"]), *model.embed_documents([given["prompt"]] * 3)]
    for vector in found:
        assert all(abs(a - b) < 1e-5 for a, b in zip(vector, given["embedding"], strict=True))


def check_langchain(given: Any) -> None:
    adder = tool(add)
    model = ChatOpenAI(model="demo", base_url=base(given), api_key="none", temperature=0)
    for method in ("json_schema", "function_calling"):
        reader: Any = model.with_structured_output(Answer, method=method)
        assert reader.invoke(QUESTION) == Answer(answer=42), method
    asked: list[Any] = [HumanMessage(QUESTION)]
    reply: Any = model.bind_tools([adder]).invoke(asked)
    assert [(call["name"], call["args"]) for call in reply.tool_calls] == [
        ("add", {"a": 17, "b": 25})
    ]
    asked += [reply, adder.invoke(reply.tool_calls[0])]
    assert "42" in str(model.bind_tools([adder]).invoke(asked).content)


def check_litellm(given: Any) -> None:
    asked = {"model": "openai/demo", "api_base": base(given), "api_key": "none", "temperature": 0}
    parsed: Any = litellm.completion(**asked, messages=MESSAGES, response_format=Answer)
    assert Answer.model_validate_json(parsed.choices[0].message.content) == Answer(answer=42)


def check_pydantic_ai(given: Any) -> None:
    model = OpenAIChatModel("demo", provider=OpenAIProvider(base_url=base(given), api_key="none"))
    for output in (Answer, NativeOutput(Answer)):
        agent: Any = Agent(model, output_type=output, model_settings={"temperature": 0})
        assert agent.run_sync(QUESTION).output == Answer(answer=42), output
    called: list[tuple[int, int]] = []

    def adding(a: int, b: int) -> int:
        """Add two numbers."""
        called.append((a, b))
        return a + b

    agent = Agent(model, tools=[adding], model_settings={"temperature": 0})
    assert "42" in agent.run_sync(QUESTION).output
    assert called == [(17, 25)]
