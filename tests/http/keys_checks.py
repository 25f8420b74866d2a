"""OpenAI's and Anthropic's own clients where callers need keys, over TLS of a private authority."""

from __future__ import annotations

import ssl
from functools import partial
from typing import Any

import anthropic
import httpx
import httpx2
import openai
from anthropic import Anthropic
from checks import refusal_of
from openai import OpenAI

ASKED: Any = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Hello!"}],
    "max_tokens": 4,
}


def client(given: Any, key: str, **options: Any) -> OpenAI:
    trusting = httpx.Client(verify=ssl.create_default_context(cafile=given["ca"]))
    defaults = {"http_client": trusting, "max_retries": 0}
    return OpenAI(base_url=given["url"] + "/v1", api_key=key, **defaults | options)


def check_each_key(given: Any) -> None:
    for key in given["keys"]:
        user = client(given, key)
        assert [model.id for model in user.models.list()] == ["demo"]
        assert user.chat.completions.create(**ASKED).usage.completion_tokens == 4
        stream = user.chat.completions.create(**ASKED, stream=True)
        assert [choice.finish_reason for chunk in stream for choice in chunk.choices][-1]


def check_a_wrong_key(given: Any) -> None:
    for key in ("wrong", given["keys"][0][:-1], given["keys"][0] + "x"):
        call = partial(client(given, key).chat.completions.create, **ASKED)
        assert "401" in refusal_of(openai.AuthenticationError, call)


def check_no_key(given: Any) -> None:
    url = given["url"] + "/v1/chat/completions"
    with httpx.Client(verify=ssl.create_default_context(cafile=given["ca"])) as user:
        for headers in ({}, {"authorization": given["keys"][0]}):
            assert user.post(url, json=ASKED, headers=headers).status_code == 401


def check_an_unknown_authority(given: Any) -> None:
    user = client(given, given["keys"][0], http_client=httpx.Client())
    call = partial(user.chat.completions.create, **ASKED)
    refusal_of(openai.APIConnectionError, call)


def check_anthropics_client(given: Any) -> None:
    def user(**credentials: Any) -> Anthropic:
        trusting = httpx2.Client(verify=ssl.create_default_context(cafile=given["ca"]))
        return Anthropic(base_url=given["url"], http_client=trusting, max_retries=0, **credentials)

    for name in ("auth_token", "api_key"):
        message = user(**{name: given["keys"][0]}).messages.create(**ASKED)
        assert message.usage.output_tokens == 4
        call = partial(user(**{name: "wrong"}).messages.create, **ASKED)
        refusal_of(anthropic.AuthenticationError, call)
