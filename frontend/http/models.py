"""The model and its tokens: `/v1/models`, `/tokenize`, `/detokenize`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import orjson

from frontend.http.errors import ParameterError, unknown_model
from frontend.http.exchange import Answer, Request
from frontend.http.parameters import Items, ModelFields, TokenId
from frontend.http.prompts import ChatFields, Message, chat_with_fields, read_tools
from frontend.http.service import Service
from frontend.validation import MAX_TOKENIZED, check_token_ids
from nano_vllm_grpc.pb import frontend_pb2 as pb
from shared.errors import UnavailableError


class TokenizeBody(ChatFields, ModelFields):
    """A prompt or a chat to tokenize."""

    prompt: str | None = None
    messages: Items[Message] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(ModelFields):
    tokens: Items[TokenId]


async def list_models(service: Service, request: Request) -> Answer:
    page = {"has_more": False, "first_id": service.model, "last_id": service.model}
    return orjson.dumps({"object": "list", "data": [_card(service)], **page})


async def retrieve(service: Service, request: Request) -> Answer:
    if (name := request.parameters["id"]) != service.model:
        raise unknown_model(name)
    return orjson.dumps(_card(service))


def _card(service: Service) -> dict[str, Any]:
    """The model, as OpenAI's and Anthropic's APIs describe one."""
    created = service.generations.facts.created  # the same on all frontends
    try:
        length = service.generations.engines.limits.max_model_len
    except UnavailableError:
        length = None
    return {
        "id": service.model,
        "object": "model",
        "type": "model",
        "display_name": service.model,
        "created": created,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat(),
        "owned_by": "nano-vllm-grpc",
        "root": service.model,
        "parent": None,
        "max_model_len": length,
    }


async def tokenize(service: Service, request: Request) -> Answer:
    """Returns the tokens that a completion, or a chat completion, would have as its prompt."""
    body = service.read(TokenizeBody, request)
    message = pb.TokenizeRequest()
    if (body.prompt is None) == (body.messages is None):
        raise ParameterError("prompt", "give either prompt or messages")
    if body.prompt is not None:
        message.text = body.prompt
    else:
        tools = read_tools([tool.function for tool in body.tools or ()], "auto", "", parallel=True)
        chat = chat_with_fields(body, body.messages or (), tools, service.template, {})
        message.chat.CopyFrom(chat)
    tokens = await service.generations.encode(message, MAX_TOKENIZED)
    texts = None
    if body.return_token_strs:
        table = service.generations.tokenizer.vocabulary.tokens
        texts = [table.get(token, b"").decode(errors="replace") for token in tokens]
    return orjson.dumps(
        {
            "count": len(tokens),
            "max_model_len": service.generations.engines.limits.max_model_len,
            "tokens": tokens,
            "token_strs": texts,
        }
    )


async def detokenize(service: Service, request: Request) -> Answer:
    """Returns the text of tokens, without special tokens."""
    body = service.read(DetokenizeBody, request)
    if len(body.tokens) > MAX_TOKENIZED:
        raise ParameterError("tokens", f"{len(body.tokens)} tokens; the limit is {MAX_TOKENIZED}")
    check_token_ids("tokens", body.tokens, service.generations.facts.vocab_size)
    text = await service.generations.tokenizer.decode(body.tokens)
    return orjson.dumps({"prompt": text})
