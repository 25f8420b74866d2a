"""Quantized weights and caches through the public API: the right tokens on every path."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from nano_vllm_grpc.pb.frontend_pb2 import GenerateRequest, SamplingParams, TokenIds
from tests.e2e.transformers_model import TransformersModel, token_prompts
from tests.faults.streams import open_streams
from tests.stack import DEMO_MODEL, RealStack, running_stack
from tests.worker_svc.quantization.writers import FORMATS, quantize_checkpoint

# A cache so small that sequences are preempted, and chunks of a few tokens. With speculation, some
# would end before others need their blocks.
SMALL = {
    **{"kv_blocks": 24, "block_size": 16, "max_num_batched_tokens": 48, "max_num_seqs": 8},
    "speculation": "none",
}


def draws(vocab_size: int) -> dict[str, GenerateRequest]:
    """Random prompts whose tokens nothing makes likely, with seeds: the least change shows. `SMALL`
    has room for all of their prompts, but not for all of their completions."""
    requests = {}
    for seed, prompt in enumerate(token_prompts(vocab_size, 6)):
        sampling = SamplingParams(temperature=1, seed=seed, max_tokens=60, ignore_eos=True)
        requests[str(seed)] = GenerateRequest(token_ids=TokenIds(ids=prompt), sampling=sampling)
    return requests


def answers(
    stack: RealStack, requests: Mapping[str, GenerateRequest], kill: bool = False
) -> dict[str, list[int]]:
    """The tokens of requests that start at once, of whose prompts nothing is cached.

    Args:
        kill: the last rank, while they run.
    """
    salted = {}
    for name, request in requests.items():
        salted[name] = GenerateRequest(cache_salt=secrets.token_hex())
        salted[name].MergeFrom(request)
    with stack.hold.after(0), open_streams(stack.address, salted) as streams:
        stack.wait_load(lambda load: load.running + load.waiting == len(salted))
        if kill:
            stack.hold.after(20)
            streams.wait_for_tokens(20)
            rank = stack.stack.num_ranks - 1
            pid = stack.kill("worker", rank)
        stack.hold.release()
        transcripts = streams.wait_ended()
    if kill:
        stack.wait_replaced("worker", rank, pid)
    return {name: each.parts[0].token_ids for name, each in transcripts.items()}


def check_preempted(
    stack: RealStack, requests: Mapping[str, GenerateRequest], alone: dict[str, list[int]]
) -> None:
    """Sends all at once, so that some are preempted."""
    assert answers(stack, requests) == alone
    assert stack.load().preemptions


def one_by_one(stack: RealStack, requests: Mapping[str, GenerateRequest]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for name, request in requests.items():
        found |= answers(stack, {name: request})
    return found


@pytest.mark.parametrize(
    ("setting", "tp"), [("int8", 2), ("int4", 1), ("GPTQ 4 asymmetric", 2)], ids=str
)
def test_tokens_are_the_same_on_every_path(
    setting: str, tp: int, tmp_path: Path, oracle: TransformersModel
) -> None:
    """Requests run alone, then all at once in chunks and preempted, then after the last rank was
    killed. The successor of the rank maps the packed weights that are kept."""
    model = DEMO_MODEL
    if setting in FORMATS:
        model = tmp_path / "demo"
        shutil.copytree(DEMO_MODEL, model)
        quantize_checkpoint(model, FORMATS[setting])
        setting = "auto"
    requests = draws(len(oracle.tokenizer))
    variables = {"model": model, "quantization": setting, "dtype": "float32", "tp": tp, **SMALL}
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    with running_stack(environment, **variables) as stack:
        alone = one_by_one(stack, requests)
        check_preempted(stack, requests, alone)
        assert answers(stack, requests, kill=True) == alone


def test_tokens_with_an_int8_cache(oracle: TransformersModel) -> None:
    """In chunks, preempted and after a kill they are those of prompts in one piece, alone."""
    requests = draws(len(oracle.tokenizer))
    with running_stack(kv_dtype="int8") as stack:
        alone = one_by_one(stack, requests)
    with running_stack(kv_dtype="int8", **SMALL) as stack:
        check_preempted(stack, requests, alone)
        assert answers(stack, requests, kill=True) == alone
