"""OpenAI's embeddings: `POST /v1/embeddings`."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Sequence
from typing import Any, Literal

import orjson

from frontend.embeddings import embed
from frontend.http.errors import ParameterError
from frontend.http.exchange import Answer, Request
from frontend.http.parameters import Int32, Items, RequestFields, TokenId
from frontend.http.service import Service
from frontend.pooled import check_count
from nano_vllm_grpc.pb import frontend_pb2 as pb
from shared.errors import InvalidArgumentError


class EmbeddingBody(RequestFields):
    """The parameters of embeddings."""

    input: str | Items[TokenId] | Items[str] | Items[Items[TokenId]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Int32 | None = None


async def create(service: Service, request: Request) -> Answer:
    """Embeds one or more texts or prompts."""
    body = service.read(EmbeddingBody, request)
    given: Any = body.input
    is_one = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
    check_count("input", [given] if is_one else given)
    if body.dimensions is not None and body.dimensions < 1:
        raise ParameterError("dimensions", f"{body.dimensions}; must be above 0")
    message = pb.EmbedRequest(
        request_id=request.request_id,
        inputs=_inputs([given] if is_one else given),
        dimensions=body.dimensions or 0,
        **body.common,
    )
    try:
        embedded = await embed(service.generations, message)
    except InvalidArgumentError as error:
        if error.field.startswith("inputs"):
            raise ParameterError(_path(error.field, is_one=is_one), error.reason) from error
        raise
    data = []
    for index, vector in enumerate(embedded.vectors):
        shown: Any = vector
        if body.encoding_format == "base64":
            shown = base64.b64encode(vector.astype("<f4").tobytes()).decode()
        each = {"object": "embedding", "index": index, "embedding": shown}
        data.append(orjson.dumps(each, option=orjson.OPT_SERIALIZE_NUMPY))
        await asyncio.sleep(0)  # there may be millions of numbers
    rest = orjson.dumps({"model": service.model, "usage": service.usage(embedded)})
    return b'{"object":"list","data":[%s],%s' % (b",".join(data), rest[1:])


def _path(field: str, *, is_one: bool) -> str:
    """The path in the body of a field of the message: input[3] for inputs[3].text."""
    path = re.sub(r"\.(text|token_ids|prompt)", "", field.replace("inputs", "input", 1))
    return path.replace("[0]", "", 1) if is_one else path


def _inputs(given: Sequence[Any]) -> list[pb.EmbedInput]:
    return [
        pb.EmbedInput(text=each)
        if isinstance(each, str)
        else pb.EmbedInput(token_ids=pb.TokenIds(ids=each))
        for each in given
    ]
