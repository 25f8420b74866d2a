"""Random bodies, mostly near valid ones: no answer is a failure of the server."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from pydantic import BaseModel

from frontend.http import chat, completions, embeddings, messages, models, responses, scores
from tests.frontend.fake_scheduler import FakeScheduler
from tests.frontend.http.conftest import POSTS, HttpService, Json
from tests.frontend.http.test_parameters import BIASES, CONSTRAINTS, ROUTED, SAMPLING

USER = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
VALID: dict[str, Json] = {
    "/v1/chat/completions": {
        "messages": [USER, {"role": "assistant", "tool_calls": [CALL]}, USER],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "response_format": {"type": "json_schema", "json_schema": {"schema": {}}},
        "max_tokens": 2,
    },
    "/v1/completions": {
        "prompt": ["hi", "a"],
        "logit_bias": {"5": 1},
        "bad_words": ["hi", "two words"],
        "structured_outputs": {"choice": ["a"]},
        "max_tokens": 2,
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "3"},
        ],
        "text": {"format": {"type": "text"}},
        "max_output_tokens": 2,
    },
    "/v1/messages": {
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]},
        ],
        "system": [{"type": "text", "text": "s"}],
        "max_tokens": 2,
    },
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/v1/embeddings": {"input": ["hi", "a"], "dimensions": 2, "encoding_format": "float"},
    "/v1/rerank": {"query": "hi", "documents": ["a", {"text": "b"}], "top_n": 1},
    "/v1/score": {"queries": ["hi", "a"], "documents": ["a", "b"], "instruction": "i"},
    "/tokenize": {"messages": [USER], "chat_template_kwargs": {}},
    "/detokenize": {"tokens": [1, 2]},
}
MODELS: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": chat.ChatBody,
    "/v1/completions": completions.CompletionBody,
    "/v1/responses": responses.ResponseBody,
    "/v1/messages": messages.MessageBody,
    "/v1/messages/count_tokens": messages.PromptBody,
    "/v1/embeddings": embeddings.EmbeddingBody,
    "/v1/rerank": scores.RerankBody,
    "/v1/score": scores.ScoreBody,
    "/tokenize": models.TokenizeBody,
    "/detokenize": models.DetokenizeBody,
}
TEXTS = st.text(st.characters(codec="utf-8"), max_size=8) | st.sampled_from(
    ["", "\x00", "user", "tool", "text", "none", "required", "json_object", "<think>", "{", "-1"]
)
NUMBERS = st.sampled_from(
    [-1, 0, 1, 2, 7, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, -(2**63), 1e300, -1e-300, 0.5, 1e-7]
)
SCALARS = st.none() | st.booleans() | NUMBERS | TEXTS
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """All pairs of a container and a key of it."""
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    found = []
    for key in keys:
        found += [(value, key), *_places(value[key])]
    return found


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(each) for key, each in value.items()}
    return [_copy(each) for each in value] if isinstance(value, list) else value


def _like(value: Any) -> st.SearchStrategy[Any]:
    """Values that a value may be replaced by, mostly of its kind."""
    if isinstance(value, bool) or value is None:
        return st.booleans() | VALUES
    if isinstance(value, int | float):
        return st.integers(-1, 3) | NUMBERS | VALUES
    return TEXTS | TEXTS | VALUES if isinstance(value, str) else VALUES


GOOD = [parameters for parameters, _ in (*SAMPLING, *BIASES, *CONSTRAINTS, *ROUTED)] + [
    *({"stream": True}, {"n": 2}, {"stop": ["e"]}, {"return_token_ids": True}, {"logprobs": 1}),
    *({"logprobs": True, "top_logprobs": 2}, {"prompt_logprobs": 1}, {"echo": True}, {"seed": -1}),
    *({"resume_token_ids": [1]}, {"use_beam_search": True, "temperature": 0}, {"user": "u"}),
    *({"truncate_prompt_tokens": 3}, {"include": ["message.output_text.logprobs"]}),
]


@st.composite
def bodies(draw: st.DrawFn, path: str) -> Any:
    """A valid body with a few parameters added and values replaced, or any JSON."""
    if draw(st.integers(0, 19)) == 0:
        return draw(VALUES)
    body = _copy(VALID[path])
    names = {field.alias or name for name, field in MODELS[path].model_fields.items()}
    for _ in range(draw(st.integers(0, 2))):
        added = draw(st.sampled_from([each for each in GOOD if each.keys() <= names] or [{}]))
        body |= _copy(added)
    if draw(st.integers(0, 4)) == 0:
        body[draw(st.sampled_from(sorted(names)))] = draw(VALUES)
    for _ in range(draw(st.integers(0, 2))):
        container, key = draw(st.sampled_from(_places(body)))
        if isinstance(container, dict) and draw(st.integers(0, 4)) == 0:
            del container[key]
        else:
            container[key] = draw(_like(container[key]))
        if not body:
            break
    return body


def _without_background(body: Any) -> Any:
    """Background responses have tests of their own."""
    if isinstance(body, dict) and body.get("background"):
        return body | {"background": False}
    return body


@pytest.fixture(autouse=True)
def long_prompts(scheduler: FakeScheduler) -> None:
    scheduler.info.max_model_len = 1000


@pytest.mark.parametrize("path", VALID)
async def test_the_bodies_are_valid(service: HttpService, path: str) -> None:
    await service.post(path, VALID[path])


@pytest.mark.parametrize("path", VALID)
@hypothesis_settings(
    max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)
@given(data=st.data())
async def test_no_body_makes_the_server_fail(
    service: HttpService, path: str, data: st.DataObject
) -> None:
    body = _without_background(data.draw(bodies(path)))
    response = await service.http.post(path, json=body)
    assert response.status_code in (200, 400, 404), response.text
    assert "Traceback" not in response.text
    if response.status_code != 200:
        assert response.json()["error"]["message"]
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert '"error":{' not in response.text
    good = await service.http.post("/v1/completions", json=POSTS["/v1/completions"])
    assert good.status_code == 200
