"""Each mode of `python -m bench`, once, on the smallest input."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import load_mode, steps
from bench.__main__ import main
from bench.metrics import Trace
from bench.workload import WorkloadRequest
from nano_vllm_grpc import AsyncLLM
from tests.bench.conftest import Bench
from tests.client.fake_server import FakeServer
from tools.make_model import make_model
from worker_svc.kernels.cpu import traced_model
from worker_svc.layers.embedding import VocabParallelHead
from worker_svc.sampling.sampler import Sampler

WORKLOAD = "--num-seqs 6 --min-input 4 --max-input 9 --min-output 5 --max-output 20"


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANO_THREADS", "1")  # the models are too small for more


# On a server whose tokens are known.


def test_a_running_server(
    server: FakeServer, bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    found = bench(f"--address {server.address} {WORKLOAD} --single-stream")
    for key in ("output_tokens_per_s", "ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s"):
        assert found[key] > 0
    assert (found["mode"], found["model"], found["requests"]) == ("stack", "fake", 6)
    assert found["steps"] is found["split_ratio"] is None  # with no scheduler to ask
    assert found["single_stream_tokens_per_s"] > 0
    assert found["workload"]["max_input"] == 9
    assert "inter-token latency p50" in capsys.readouterr().out


def test_load(server: FakeServer, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that answers 100 requests/s, one after another, in a time without noise."""

    async def send(llm: AsyncLLM, due: list[float], requests: list[WorkloadRequest]) -> list[Trace]:
        traces, free = [], 0.0
        for when, request in zip(due, requests, strict=True):
            free = max(free, when) + 0.01
            arrivals = [(free, 1), (free, request.output_len - 1)]
            traces.append(Trace(len(request.prompt), sent=when, arrivals=arrivals))
        return traces

    monkeypatch.setattr(load_mode, "_send", send)
    monkeypatch.setattr("tests.client.fake_server.ENDLESS_SEED", None)
    words = f"--mode load --address {server.address} --rate 20 --growth 2 --seconds 10"
    loads = bench(words)["loads"]
    # At 160 requests/s the last is answered 16 s after the first came, more than 1.5 times 10 s.
    assert [load["duration_s"] > 15 for load in loads] == [False, False, False, True]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--max-output 9000", "--max-output"),
        ("--min-input 10 --max-input 5", "--min-input"),
        ("--num-seqs 0", "--num-seqs: must be at least 1"),
        ("--address 127.0.0.1:1", "UNAVAILABLE: 127.0.0.1:1"),
        ("--mode load --growth 1", "--growth: must be over 1"),
        ("--mode scheduler --rounds 0", "--rounds: must be at least 1"),
        ("--mode kill --model /nowhere", "bench: MODEL: /nowhere"),
    ],
)
def test_an_impossible_measurement_gives_a_plain_message(
    server: FakeServer, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    address = [] if "--mode s" in words or "--mode k" in words else ["--address", server.address]
    try:
        status: object = main([*address, *words.split()])
    except SystemExit as end:
        status = end.code
    assert status != 0
    assert message in capsys.readouterr().err


def test_steps(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [(traced_model, "run"), (traced_model.Program, "_run_host_call")]
    for owner, name in [*parts, (VocabParallelHead, "__call__"), (Sampler, "__call__")]:
        monkeypatch.setattr(owner, name, getattr(owner, name))  # restored after the test
    monkeypatch.setattr(steps, "STEPS", ((2, 0), (1, 8)))
    monkeypatch.setattr(steps, "_MIN_S", 0.0)
    found = bench("--mode steps --parts")
    assert list(found["seconds"]) == ["2 decodes", "1 decodes and 8 tokens"]
    assert min(found["seconds"].values()) > 0
    for times in found["parts"].values():
        assert {"qkv_proj", "attend", "head", "sampler"} <= set(times)


# Through real processes.


@pytest.mark.system
def test_a_private_stack_and_in_process(tmp_path: Path, bench: Bench) -> None:
    overrides = {"vocab_size": 1536, "max_position_embeddings": 128}
    model = make_model(tmp_path / "tiny", "tiny", overrides)
    found = bench(f"--model {model} {WORKLOAD}")
    in_process = found["in_process"]
    ratio = found["output_tokens_per_s"] / in_process["output_tokens_per_s"]
    assert found["split_ratio"] == pytest.approx(ratio)
    assert found["steps"] > 0  # the private stack's scheduler was asked
    for key in ("output_tokens", "prompt_tokens"):
        assert found[key] == in_process[key]


@pytest.mark.system
def test_scheduler(bench: Bench) -> None:
    # The kernel counts CPU time in hundredths of a second: 300 steps take a quarter of one.
    sizes = "--num-seqs 4 --context 40 --steps 300 --rounds 2"
    found = bench(f"--mode scheduler {sizes}")
    (decode,) = found["decode"]
    for key in ("steps_per_s", "tokens_per_s", "scheduler_cpu_ms"):
        assert decode[key] > 0
    assert decode["num_seqs"] == decode["mean_batch"] == 4


@pytest.mark.system
def test_http(bench: Bench) -> None:
    found = bench("--mode http --streams 2 --tokens 4 --pairs 1")
    assert found["ratio"] > 0
    assert found["http_ttft_ms"] > 0


@pytest.mark.system
def test_cache_dir(bench: Bench) -> None:
    found = bench("--mode cache-dir --conversations 4 --tokens 100 --turns 1 --streams 2")
    for name in ("returning", "pressure", "cost"):
        assert all(value > 0 for value in found[name].values())


@pytest.mark.system
def test_embeddings(bench: Bench) -> None:
    """This server's part. Both stacks have the same weights, in another format."""
    words = "--mode embeddings --only nano-float32 nano-int8 --texts 3 --rounds 1"
    found = bench(f"{words} --min-input 4 --max-input 9")
    first, second = found["entries"]
    assert (first["name"], second["name"]) == ("nano-float32", "nano-int8")
    assert first["tokens_per_s"] > 0
    assert first["least_cosine_to_the_first"] == pytest.approx(1, abs=1e-6)
    assert 0.9 < second["least_cosine_to_the_first"] < 1
