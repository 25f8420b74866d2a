"""Scores of documents for queries: `POST /v1/rerank` as of Jina, Cohere and vLLM, and vLLM's `POST
/v1/score`."""

from __future__ import annotations

from typing import Any

import orjson

from frontend.http.errors import ParameterError
from frontend.http.exchange import Answer, Request
from frontend.http.parameters import Body, Int32, Items, RequestFields
from frontend.http.service import Service, now
from frontend.pooled import check_count
from frontend.scores import Scored, score_documents
from nano_vllm_grpc.pb import frontend_pb2 as pb


class _Fields(RequestFields):
    """The parameters that both APIs have."""

    instruction: str | None = None


class Document(Body):
    """A document as an object."""

    text: str


class RerankBody(_Fields):
    """A query, and documents to sort by their relevance to it."""

    query: str
    documents: Items[str | Document]
    top_n: Int32 | None = None
    return_documents: bool | None = None


class ScoreBody(_Fields):
    """Queries and documents, under either of their two names."""

    queries: str | Items[str] | None = None
    documents: str | Items[str] | None = None
    text_1: str | Items[str] | None = None
    text_2: str | Items[str] | None = None


async def rerank(service: Service, request: Request) -> Answer:
    """Sorts documents by their relevance to a query, the most relevant first."""
    body = service.read(RerankBody, request)
    if body.top_n is not None and body.top_n < 0:
        raise ParameterError("top_n", f"{body.top_n}; must be at least 0")
    documents = [each if isinstance(each, str) else each.text for each in body.documents]
    scored = await _score(service, request, body, [body.query], documents)
    scores = scored.probabilities
    results: list[dict[str, Any]] = []
    # By the log-odds, because probabilities near 1 are equal. Of equals, the first one is first.
    for index in sorted(range(len(scores)), key=scored.log_odds.__getitem__, reverse=True):
        result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
        if body.return_documents is not False:
            result["document"] = {"text": documents[index]}
        results.append(result)
    return orjson.dumps(
        {
            "id": scored.prompts.request_id,
            "model": service.model,
            "usage": service.usage(scored.prompts),
            "results": results[: body.top_n or None],
        }
    )


async def score(service: Service, request: Request) -> Answer:
    """Scores each document for its query, or for the only one."""
    body = service.read(ScoreBody, request)
    queries = _either(body, "queries", "text_1")
    documents = _either(body, "documents", "text_2")
    scored = await _score(service, request, body, queries, documents)
    data = [
        {"index": index, "object": "score", "score": value}
        for index, value in enumerate(scored.probabilities)
    ]
    return orjson.dumps(
        {
            "id": scored.prompts.request_id,
            "object": "list",
            "created": now(),
            "model": service.model,
            "data": data,
            "usage": service.usage(scored.prompts),
        }
    )


def _either(body: ScoreBody, *names: str) -> list[str]:
    """The texts of the parameter that the request has.

    Raises:
        ParameterError: it has none or both.
    """
    given = [found for name in names if (found := getattr(body, name)) is not None]
    if len(given) != 1:
        raise ParameterError(names[0], f"give either {names[0]} or {names[1]}")
    return [given[0]] if isinstance(given[0], str) else given[0]


async def _score(
    service: Service, request: Request, body: _Fields, queries: list[str], documents: list[str]
) -> Scored:
    check_count("documents", documents)
    message = pb.ScoreRequest(
        request_id=request.request_id,
        queries=queries,
        documents=documents,
        instruction=body.instruction or "",
        **body.common,
    )
    return await score_documents(service.generations, message)
