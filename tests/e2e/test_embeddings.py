"""Embeddings and scores of a real stack against transformers."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from nano_vllm_grpc import LLM, SamplingParams
from nano_vllm_grpc.errors import InvalidRequestError
from tests.e2e.transformers_model import TransformersModel, token_prompts
from tests.stack import running_stack

TEXTS = ["Once upon a time", "a", "3 + 4 = ", "Anna lives in a house. " * 30]
PROMPTS = token_prompts(1536, 20)
# Prompts in chunks, and a cache so small that sequences are preempted.
SMALL = {"kv_blocks": 24, "block_size": 16, "max_num_batched_tokens": 48, "max_num_seqs": 8}


QUERIES = ["Where does Anna live?", "3 + 4 = "]
# Of the demo model's 1_LogitScore/config.json.
YES, NO = 1289, 1147


def expected(oracle: TransformersModel, ids: list[int], pooling: str) -> NDArray[np.float32]:
    with torch.no_grad():
        states = oracle.model.model(torch.tensor([ids])).last_hidden_state[0]
    vector = states[-1] if pooling == "last" else states.mean(0)
    found: NDArray[np.float32] = torch.nn.functional.normalize(vector, dim=0).numpy()
    return found


def expected_score(oracle: TransformersModel, query: str, document: str) -> float:
    """By Qwen3-Reranker's prompt and its rule."""
    task = "Given a web search query, retrieve relevant passages that answer the query"
    system = (
        "Judge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".'
    )
    user = f"<Instruct>: {task}\n<Query>: {query}\n<Document>: {document}"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    text = oracle.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    with torch.no_grad():
        logits = oracle.model(torch.tensor([oracle.encode(text)])).logits[0, -1]
    return float(torch.softmax(logits[[NO, YES]].double(), 0)[1])


@pytest.mark.parametrize(
    ("pooling", "tp", "way"), [("auto", 1, "last"), ("mean", 2, "mean")], ids=["last", "mean"]
)
def test_embeddings_equal_transformers_beside_completions_and_kills(
    oracle: TransformersModel, pooling: str, tp: int, way: str
) -> None:
    """Whatever else is in the batch, and if a worker is killed meanwhile."""
    with running_stack(pooling=pooling, tp=tp, **SMALL) as stack, LLM(stack.address) as llm:
        params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
        beside: list[str] = []
        completing = threading.Thread(
            target=lambda: beside.extend(
                each["text"] for each in llm.generate(TEXTS[:3], params, use_tqdm=False)
            )
        )
        completing.start()
        found = llm.embed(PROMPTS)
        for ids, vector in zip(PROMPTS, found, strict=True):
            right = expected(oracle, ids, way)
            np.testing.assert_allclose(np.array(vector), right, rtol=0, atol=1e-5)
        scores = llm.score(QUERIES[0], TEXTS)
        os.kill(stack.pid("worker"), signal.SIGKILL)
        scores += llm.score([*QUERIES, *QUERIES], TEXTS)
        queries = [QUERIES[0]] * 4 + [*QUERIES, *QUERIES]
        right_scores = [
            expected_score(oracle, query, text)
            for query, text in zip(queries, TEXTS * 2, strict=True)
        ]
        np.testing.assert_allclose(scores, right_scores, rtol=0, atol=1e-5)
        assert max(scores) - min(scores) > 0.01
        texts = llm.embed(TEXTS, dimensions=64)
        for text, vector in zip(TEXTS, texts, strict=True):
            right = expected(oracle, oracle.encode(text), way)[:64]
            right = right / np.linalg.norm(right)
            np.testing.assert_allclose(np.array(vector), right, rtol=0, atol=1e-5)
        completing.join()
        assert len(beside) == 3
        (one,) = llm.embed(PROMPTS[3])
        assert one == pytest.approx(found[3], abs=1e-5)
        with pytest.raises(InvalidRequestError, match=r"inputs\[1\]"):
            llm.embed(["a", ""])
        with pytest.raises(ValueError, match="2 queries for 4 documents"):
            llm.score(QUERIES, TEXTS)
