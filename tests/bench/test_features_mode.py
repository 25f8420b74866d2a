"""The benchmark of sampling features, on a server whose tokens are known."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from bench import features_mode
from bench.features_mode import FEATURES, main
from nano_vllm_grpc.pb.frontend_pb2 import SamplingParams
from tests.client.fake_server import FakeServer

KNOWN_BY: dict[str, Callable[[SamplingParams], object]] = {
    "top_k 20, top_p 0.95": lambda asked: asked.top_k,
    "min_p 0.05": lambda asked: asked.min_p,
    "penalties": lambda asked: asked.presence_penalty,
    "logit_bias": lambda asked: asked.logit_bias,
    "logprobs 5": lambda asked: asked.HasField("logprobs"),
    "regex": lambda asked: asked.HasField("structured_output"),
}


def feature(asked: SamplingParams) -> str:
    (name,) = [name for name, known_by in KNOWN_BY.items() if known_by(asked)] or ["plain"]
    return name


def test_streams_with_each_feature_run_alone_and_beside_plain_ones(
    server: FakeServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(features_mode, "private_stack", lambda *_: nullcontext(server))
    out = tmp_path / "features.json"
    sizes = ["--streams", "4", "--tokens", "3", "--pairs", "2", "--out", str(out)]
    assert main(sizes) == 0

    # Each run has four streams: half and half to warm up, then twice all plain, all with the
    # feature, and half and half.
    requests = [each.sampling for each in server.service.requests]
    runs = [Counter(map(feature, requests[i : i + 4])) for i in range(0, len(requests), 4)]
    expected = []
    for each in FEATURES:
        plain, alone, mixed = {"plain": 4}, {each: 4}, {"plain": 2, each: 2}
        expected += [mixed, *2 * [plain, alone, mixed]]
    assert runs == expected
    assert {each.max_tokens for each in requests} == {3}

    found = json.loads(out.read_text())
    said = capsys.readouterr().out
    assert [cost["feature"] for cost in found["costs"]] == list(FEATURES)
    assert all(name in said for name in FEATURES)
    assert (found["streams"], found["tokens"], found["pairs"]) == (4, 3, 2)
