"""Scores over gRPC and HTTP, from a scheduler whose scores are the lengths of the prompts - 40."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import grpc
import pytest

from frontend import pooled
from nano_vllm_grpc.pb import frontend_pb2 as pb
from shared.pb import scheduler_pb2
from tests.frontend import fake_scheduler
from tests.frontend.conftest import DEMO, failure
from tests.frontend.http.conftest import HttpService, Json
from tests.frontend.test_generation import accept_long_sequences

DOCUMENTS = ["Anna lives in a house by the sea.", "No.", "Ben has a dog."]
QUERY = "Where does Anna live?"
YES, NO = 1289, 1147  # of the demo model's 1_LogitScore/config.json


@pytest.fixture(autouse=True)
async def long_sequences(service: HttpService) -> None:
    await accept_long_sequences(service)


def request(documents: list[str] = DOCUMENTS, **fields: Any) -> pb.ScoreRequest:
    return pb.ScoreRequest(**{"queries": [QUERY], "documents": documents, **fields})


async def num_tokens(service: HttpService, query: str, document: str, task: str = "") -> int:
    """The number of tokens of the prompt for a document."""
    task = task or "Given a web search query, retrieve relevant passages that answer the query"
    content = f"<Instruct>: {task}\n<Query>: {query}\n<Document>: {document}"
    chat = pb.Chat(
        messages=[
            pb.ChatMessage(
                role="system",
                content="Judge whether the Document meets the requirements based on the Query and "
                'the Instruct provided. Note that the answer can only be "yes" or "no".',
            ),
            pb.ChatMessage(role="user", content=content),
        ]
    )
    return len((await service.stub.Tokenize(pb.TokenizeRequest(chat=chat))).token_ids)


def probability(length: int) -> float:
    return 1 / (1 + math.exp(40 - length))


async def test_scores_over_grpc(service: HttpService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_scheduler, "embedding", lambda prompt, _: [(len(prompt) - 150) / 50])
    answer = await service.stub.Score(request(request_id="mine", priority=3, instruction="Find."))
    lengths = [await num_tokens(service, QUERY, each, "Find.") for each in DOCUMENTS]
    expected = [1 / (1 + math.exp((150 - length) / 50)) for length in lengths]
    assert list(answer.scores) == pytest.approx(expected)
    assert len(set(answer.scores)) == 3
    assert (answer.request_id, answer.usage.prompt_tokens) == ("mine", sum(lengths))
    submit = await service.scheduler.submits.get()
    assert (submit.request_id, submit.priority) == ("mine", 3)
    sampling = submit.sampling
    assert sampling.pooling == scheduler_pb2.POOLING_SCORE
    assert (sampling.yes_id, sampling.no_id, sampling.max_tokens) == (YES, NO, 1)


async def test_a_query_for_each_document(
    service: HttpService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_scheduler, "embedding", lambda prompt, _: [(len(prompt) - 150) / 50])
    queries = ["a", "the second query", "c d"]
    scores = list((await service.stub.Score(request(queries=queries))).scores)
    for query, document, score in zip(queries, DOCUMENTS, scores, strict=True):
        (one,) = (await service.stub.Score(request([document], queries=[query]))).scores
        assert one == score


async def test_documents_are_sorted(service: HttpService) -> None:
    """By more than their probabilities, which are all 1 here."""
    lengths = [await num_tokens(service, QUERY, each) for each in DOCUMENTS]
    body: Json = {"model": "demo", "query": QUERY, "documents": [DOCUMENTS[0], *DOCUMENTS[1:]]}
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        whole = await service.post(path, body)
    assert whole["usage"] == {"prompt_tokens": sum(lengths), "total_tokens": sum(lengths)}
    assert whole["model"] == "demo"
    assert [each["index"] for each in whole["results"]] == [0, 2, 1]
    for each in whole["results"]:
        assert each["document"] == {"text": DOCUMENTS[each["index"]]}
        assert each["relevance_score"] == pytest.approx(probability(lengths[each["index"]]))
    objects = body | {"documents": [{"text": each} for each in DOCUMENTS], "top_n": 2}
    short = await service.post("/v1/rerank", objects | {"return_documents": False})
    keys = ("index", "relevance_score")
    assert short["results"] == [{key: each[key] for key in keys} for each in whole["results"][:2]]
    equal = await service.post("/v1/rerank", body | {"documents": ["a", "b", "a"], "top_n": 0})
    assert [each["index"] for each in equal["results"]] == [0, 1, 2]


async def test_the_two_names_of_vllms_scores(service: HttpService) -> None:
    named = await service.post("/v1/score", {"queries": QUERY, "documents": DOCUMENTS})
    numbered = await service.post("/score", {"text_1": [QUERY] * 3, "text_2": DOCUMENTS})
    assert named["data"] == numbered["data"]
    lengths = [await num_tokens(service, QUERY, each) for each in DOCUMENTS]
    assert named["data"] == [
        {"index": i, "object": "score", "score": pytest.approx(probability(length))}
        for i, length in enumerate(lengths)
    ]
    assert (named["object"], named["usage"]["prompt_tokens"]) == ("list", sum(lengths))


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"query": None}, "query"),
        ({"documents": []}, "documents"),
        ({"documents": ["a"] * 2049}, "documents"),
        ({"documents": ["a", {"id": 1}]}, "documents[1]"),
        ({"documents": ["a", "b" * 20_000]}, "documents[1]"),
        ({"top_n": -1}, "top_n"),
        ({"model": "other"}, "model"),
        ({"max_tokens_per_doc": 5}, "max_tokens_per_doc"),
        ({"engine": "nowhere"}, "engine"),
    ],
)
async def test_what_rerank_refuses(service: HttpService, change: Json, param: str) -> None:
    body = {"query": QUERY, "documents": ["a"]} | change
    status, found = await service.error("/v1/rerank", body)
    assert status == (404 if param == "model" else 400)
    assert str(found["error"]["param"]).startswith(param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ({"queries": ["a", "b"], "documents": "a"}, "queries"),
        ({"text_1": "a", "text_2": ["b", "c" * 20_000]}, "text_2[1]"),
        ({"queries": "a"}, "documents"),
        ({"queries": "a", "text_1": "a", "documents": "a"}, "queries"),
        ({"queries": 1, "documents": "a"}, "queries"),
    ],
)
async def test_what_score_refuses(service: HttpService, body: Json, param: str) -> None:
    status, found = await service.error("/v1/score", body)
    assert (status, found["error"]["param"]) == (400, param)
    assert service.scheduler.submits.empty()  # none was computed


@pytest.mark.parametrize(
    ("message", "details"),
    [
        (request([]), "documents: 0 inputs; must be 1 to 2048"),
        (request(queries=[]), "queries: 0; must be 1, or one for each document"),
        (request(["a", "b" * 20_000]), "documents[1]: "),
    ],
)
async def test_what_grpc_refuses(
    service: HttpService, message: pb.ScoreRequest, details: str
) -> None:
    error = await failure(service.stub.Score(message))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert str(error.details()).startswith(details)


async def test_prompts_have_a_limit_together(
    service: HttpService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long query with many documents would be a small request, and much work."""
    one = await num_tokens(service, QUERY, "a")
    monkeypatch.setattr(pooled, "MAX_TOKENS", 2 * one)
    await service.stub.Score(request(["a", "a"]))
    error = await failure(service.stub.Score(request(["a", "a", "a"])))
    reason = f"{3 * one} tokens with those before; the limit is {2 * one}"
    assert error.details() == f"documents[2]: {reason}"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
async def test_a_score_that_is_no_number_is_an_error(
    service: HttpService, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_scheduler, "embedding", lambda *_: [value])
    assert (await failure(service.stub.Score(request()))).code() == grpc.StatusCode.INTERNAL


@pytest.fixture
def without_answers(tmp_path: Path) -> str:
    """The demo model without the file that names the tokens of scores."""
    for path in DEMO.iterdir():
        if path.is_file():
            (tmp_path / path.name).symlink_to(path)
    return str(tmp_path)


class TestWithoutTokens:
    @pytest.fixture
    def changes(self, without_answers: str) -> Json:
        return {"model": without_answers}

    async def test_a_model_may_lack_the_tokens(self, service: HttpService) -> None:
        error = await failure(service.stub.Score(request()))
        reason = 'the model has no tokens "yes" and "no", by which it would score'
        assert error.details() == f"documents: {reason}"


class TestWithOneToken:
    @pytest.fixture
    def changes(self, without_answers: str) -> Json:
        path = Path(without_answers) / "1_LogitScore"
        path.mkdir()
        (path / "config.json").write_text('{"true_token_id": 5}')
        return {"model": without_answers}

    async def test_its_logit_has_no_scale(self, service: HttpService) -> None:
        error = await failure(service.stub.Score(request()))
        assert "1_LogitScore/config.json names one token; must be two" in str(error.details())


class TestWithTokens:
    @pytest.fixture
    def changes(self, without_answers: str) -> Json:
        """A vocabulary where token 5 is "no"."""
        path = Path(without_answers) / "tokenizer.json"
        tokenizer = json.loads(path.read_text())
        vocabulary = tokenizer["model"]["vocab"]
        name = next(text for text, token_id in vocabulary.items() if token_id == 5)
        vocabulary["no"] = vocabulary.pop(name)
        path.unlink()
        path.write_text(json.dumps(tokenizer))
        return {"model": without_answers}

    async def test_yes_and_no_are_the_vocabularys(self, service: HttpService) -> None:
        await service.stub.Score(request())
        sampling = (await service.scheduler.submits.get()).sampling
        assert (sampling.yes_id, sampling.no_id) == (YES, 5)
