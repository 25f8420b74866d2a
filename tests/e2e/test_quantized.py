"""Quantized weights and caches through the public API: the right tokens on every path."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from nano_vllm_grpc.pb.frontend_pb2 import GenerateRequest, SamplingParams, TokenIds
from tests.e2e.transformers_model import TransformersModel, token_prompts
from tests.faults.streams import open_streams
from tests.stack import DEMO_MODEL, RealStack, UnmetPreconditionError, running_stack
from tests.worker_svc.quantization.writers import FORMATS, PROJECTIONS, quantize_checkpoint
from tests.worker_svc.test_model_runner import make_runner
from worker_svc.models.config import load_model_config
from worker_svc.weights.files import WeightReader
from worker_svc.weights.quantization.choice import choose_quantization
from worker_svc.weights.quantization.formats import QuantizedWeight, quantize_rows
from worker_svc.weights.quantization.quantize import quantize

# A cache so small that sequences are preempted, and chunks of a few tokens.
SMALL = {"kv_blocks": 24, "block_size": 16, "max_num_batched_tokens": 48, "max_num_seqs": 8}
# The demo model knows these answers by heart: see `Exact.check`.
QUESTIONS = (
    "What is 17 + 25?",
    "Count to ten.",
    "What is 8 + 9?",
    "What is the capital of France?",
    "What is 41 + 6?",
    "What is the sun?",
)
# How far apart two logits have to be so that rounding does not swap them. It changes a code of x
# here and there, later codes with it, and then logits by up to 0.2.
CLEAR = 1.0


class ExactLinear(torch.nn.Module):
    """x Wᵀ from sums of integers, which float64 holds exactly, and W's and x's scales."""

    def __init__(self, weight: QuantizedWeight) -> None:
        super().__init__()
        self._scales = weight.scales.double()
        self._codes = weight.unpacked().double().unflatten(1, (-1, weight.group_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes, scales = quantize_rows(x.flatten(0, -2))
        groups = codes.double().unflatten(1, self._codes.shape[1:])
        sums = torch.einsum("tgi,ogi->tog", groups, self._codes)
        product = (sums * self._scales).sum(2) * scales.double()[:, None]
        return product.float().unflatten(0, x.shape[:-1])


class Exact:
    """The demo model in transformers, with products as the definition of the format has them.

    Args:
        path: of the checkpoint that is served.
        setting: QUANTIZATION.
    """

    def __init__(self, path: Path, setting: str) -> None:
        oracle = TransformersModel(DEMO_MODEL)
        self.tokenizer = oracle.tokenizer
        self._model = oracle.model
        choice = choose_quantization(setting, load_model_config(path).quantization)
        with WeightReader(path, torch.float32, torch.device("cpu")) as reader:
            for name, layer in list(self._model.named_modules()):
                if not name.endswith(PROJECTIONS):
                    continue
                if choice.checkpoint:
                    rows, columns = map(range, layer.weight.shape)
                    weight = choice.checkpoint.read(reader, name, rows, columns, len(columns))
                else:
                    assert choice.quantize_to
                    weight = quantize(layer.weight.data, choice.quantize_to)
                self._model.set_submodule(name, ExactLinear(weight))
        if choice.quantize_to:
            table = quantize(self._model.lm_head.weight.data, "int8")
            self._model.lm_head = ExactLinear(table)
            self._model.model.embed_tokens.weight.data = table.dequantized()

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """[len(token_ids), vocabulary]"""
        with torch.inference_mode():
            logits: torch.Tensor = self._model(torch.tensor([token_ids])).logits[0]
        return logits

    def check(self, prompt: list[int], completion: list[int]) -> None:
        """Checks that each token is the greedy one after those before it: then all of them are
        right, up to the end."""
        after = self.logits(prompt + completion)[len(prompt) - 1 : -1]
        assert completion == after.argmax(dim=1).tolist()
        assert completion[-1] in self._model.generation_config.eos_token_id
        first, second = after.topk(2).values.unbind(dim=1)
        assert (first - second).min() > CLEAR, "not a question that this model can be asked"


def questions(tokenizer: Any) -> dict[str, GenerateRequest]:
    """Chats, each with more turns than the one before; greedy."""
    requests = {}
    for number, question in enumerate(QUESTIONS):
        messages = []
        for earlier in QUESTIONS[:number]:
            messages += [{"role": "user", "content": earlier}]
            messages += [{"role": "assistant", "content": "I do not know."}]
        messages += [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        sampling = SamplingParams(temperature=0, max_tokens=60)
        ids = TokenIds(ids=tokenizer(text)["input_ids"])
        requests[question] = GenerateRequest(token_ids=ids, sampling=sampling)
    return requests


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
    """The tokens of requests that are sent at once, of whose prompts nothing is cached.

    Args:
        kill: the last rank, while they run.
    """
    salted = {}
    for name, request in requests.items():
        salted[name] = GenerateRequest(cache_salt=secrets.token_hex())
        salted[name].MergeFrom(request)
    with open_streams(stack.address, salted) as streams:
        if kill:
            streams.wait_until(lambda: sum(t.num_tokens for t in streams.transcripts.values()) > 60)
            rank = stack.stack.num_ranks - 1
            pid = stack.kill("worker", rank, while_true=lambda: streams.open)
        transcripts = streams.wait_ended()
    if kill:
        stack.wait_replaced("worker", rank, pid)
    return {name: each.parts[0].token_ids for name, each in transcripts.items()}


def check_preempted(
    stack: RealStack, requests: Mapping[str, GenerateRequest], alone: dict[str, list[int]]
) -> None:
    """Sends all at once, so that some are preempted."""
    assert answers(stack, requests) == alone
    if not stack.load().preemptions:
        raise UnmetPreconditionError("nothing was preempted")


def one_by_one(stack: RealStack, requests: Mapping[str, GenerateRequest]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for name, request in requests.items():
        found |= answers(stack, {name: request})
    return found


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """With a cache of packed weights, which the successor of a worker maps."""
    return {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}


@dataclass(frozen=True)
class Served:
    """A model, how it is served, and what is right."""

    settings: dict[str, Any]
    tp: int
    exact: Exact


@pytest.fixture(
    scope="module",
    params=[("int8", 2), ("int4", 1), ("GPTQ 4 asymmetric", 2)],
    ids=lambda param: f"{param[0]}, TP {param[1]}",
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    model, (setting, tp) = DEMO_MODEL, request.param
    if setting in FORMATS:
        model = tmp_path_factory.mktemp("quantized") / "demo"
        shutil.copytree(DEMO_MODEL, model)
        quantize_checkpoint(model, FORMATS[setting])
        setting = "auto"
    settings = {"model": model, "quantization": setting, "dtype": "float32"}
    return Served(settings, tp, Exact(model, setting))


def test_tokens_are_those_of_exact_products(served: Served, environment: dict[str, str]) -> None:
    """Tokens of each request alone, of all at once in chunks and preempted, and after the last rank
    was killed."""
    tokenizer = served.exact.tokenizer
    asked, drawn = questions(tokenizer), draws(len(tokenizer))
    requests = drawn | asked
    with running_stack(environment, **served.settings, **SMALL, tp=served.tp) as stack:
        alone = one_by_one(stack, requests)
        check_preempted(stack, requests, alone)
        assert answers(stack, requests, kill=True) == alone
    for name, request in asked.items():
        served.exact.check(list(request.token_ids.ids), alone[name])


def test_logits_are_those_of_exact_products(
    served: Served, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After so few tokens that rounding changes no code of x in most prompts."""
    monkeypatch.setenv("XDG_CACHE_HOME", environment["XDG_CACHE_HOME"])
    settings = {name: value for name, value in served.settings.items() if name != "model"}
    runner, batch = make_runner(served.settings["model"], **settings)
    prompts = [[token, token + 1] for token in range(0, 1500, 50)]
    found = runner.logits(batch.step(list(enumerate(prompts))))
    expected = torch.stack([served.exact.logits(prompt)[-1] for prompt in prompts])
    differences = (found[:, : expected.shape[1]] - expected).abs().amax(dim=1)
    print(f"largest differences: {differences.sort().values.tolist()}")
    assert differences.quantile(0.7) < 1e-5
    assert differences.max() < CLEAR / 2


def test_tokens_with_an_int8_cache(oracle: TransformersModel) -> None:
    """In chunks, preempted and after a kill they are those of prompts in one piece, alone."""
    requests = draws(len(oracle.tokenizer)) | questions(oracle.tokenizer)
    with running_stack(kv_dtype="int8") as stack:
        alone = one_by_one(stack, requests)
    with running_stack(kv_dtype="int8", **SMALL) as stack:
        check_preempted(stack, requests, alone)
        assert answers(stack, requests, kill=True) == alone


def test_logits_with_an_int8_cache(oracle: TransformersModel) -> None:
    """They are close to those with the cache as it is, but not the same."""
    prompts = [prompt for prompt in token_prompts(len(oracle.tokenizer), 12) if len(prompt) > 20]
    found = []
    for kv_dtype in ("auto", "int8"):
        runner, batch = make_runner(DEMO_MODEL, dtype="float32", kv_dtype=kv_dtype)
        found.append(runner.logits(batch.step(list(enumerate(prompts)))))
    exact, packed = found
    difference = (packed - exact).norm() / exact.norm()
    print(f"{difference:.4f} of the norm")
    assert 1e-5 < difference < 0.02
