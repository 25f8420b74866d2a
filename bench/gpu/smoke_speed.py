"""The first parts of the smoke run: first the GPU and its software without a model, then a model.
The first tests help to understand why a later one fails."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import pytest
import torch

from bench.gpu import step_speed
from bench.gpu.attention_speed import report_rate
from bench.gpu.ceilings_speed import bandwidth
from bench.gpu.records import Report
from bench.gpu.run import REHEARSED_MODEL, ROOT
from bench.gpu.setup import Setup
from bench.gpu.step_speed import Loaded
from bench.gpu.steps import Sequences, blocks_needed, make_step
from shared.graph_sizes import graph_size
from worker_svc.model_runner import ModelRunner
from worker_svc.step.arrays import StepArrays
from worker_svc.step.decode import MAX_RUN
from worker_svc.step.wire import Int32s

PROMPTS = 8
# The maximum distance of a token's logit below the largest logit, as a share of the largest less
# the mean. In bfloat16, rounding decides near ties. A wrong token's share is near 1.
TOLERANCE = 0.05
WEIGHTS = ROOT.glob("models/*/*.safetensors")
# Layers of the 8B shape, with few tokens in its vocabulary so that it is made in seconds.
TWO_LAYERS = ("--shape", "qwen3-8b", "--set", "num_hidden_layers=2", "--set", "vocab_size=4096")

pytestmark = pytest.mark.timeout(120)  # the first part compiles


def measure_copy(setup: Setup, report: Report) -> None:
    """Copies 1 GiB without Triton and without code of the worker."""
    report.note(f"torch {torch.__version__}, CUDA {torch.version.cuda}, {setup.device}")
    source = torch.ones(setup.sizes.read_bytes // 4, device=setup.device)
    target = torch.empty_like(source)
    seconds = setup.timer.eager(lambda: target.copy_(source))
    assert torch.equal(source, target)
    report.figure("copy", 2e-9 * setup.sizes.read_bytes / seconds, "GB/s")


def measure_imports() -> None:
    import worker_svc.devices.cuda  # noqa: F401

    assert callable(torch.nn.functional.scaled_mm)


def measure_bandwidth(setup: Setup, report: Report) -> None:
    """Runs a first Triton kernel."""
    bandwidth(setup, report)


@pytest.fixture(scope="module")
def loaded(setup: Setup) -> Loaded:
    return Loaded(setup)


def measure_load(setup: Setup, report: Report, loaded: Loaded) -> None:
    """Loads the model, warms up, and captures graphs."""
    info = loaded.runner.info
    if setup.rehearse:
        report.note("no graphs on a CPU: the same padded steps, launched kernel by kernel")
    assert loaded.runner._model.graphs
    report.note(f"{info.attention_backend}, {info.dtype}, {info.num_blocks} blocks fit")


def measure_graphs_against_eager(setup: Setup, report: Report, loaded: Loaded) -> None:
    """Decodes greedily from graphs, then asks for the logits of the same steps without them."""
    runner, num_blocks = loaded.runner, loaded.num_blocks
    texts, tokens = greedy(setup, runner, num_blocks)
    again = steps(setup, runner, num_blocks, texts, iter(tokens))
    logits = [runner.logits(step) for step in again]
    compare(report, "graphs against eager", torch.stack(logits, 1), tokens)


def measure_prompts_from_a_graph(setup: Setup, report: Report, loaded: Loaded) -> None:
    """Runs a step of prompts kernel by kernel, then from a graph."""
    runner, (num_prompts, tokens) = loaded.runner, setup.sizes.prompt_steps[0]
    step = loaded.step(f"{num_prompts} x {tokens} tokens")
    step = replace(step, temperatures=np.zeros_like(step.temperatures))
    size = graph_size(0, num_prompts, num_prompts * tokens, PROMPTS, loaded.graph_tokens)
    for way, each in (("kernel by kernel", step), ("from a graph", replace(step, graph=size))):
        sampled = runner.run(each)  # captures
        seconds = [runner.launch(each).wait().seconds for _ in range(setup.sizes.repeats)]
        report.figure(f"{num_prompts} x {tokens} tokens {way}", 1e3 * median(seconds), "ms")
    compare(report, "prompts from a graph", runner.logits(step)[:, None], [sampled])


def measure_a_run(setup: Setup, report: Report, loaded: Loaded) -> None:
    """Decodes steps that are uploaded one by one, then as a run, which is uploaded once."""
    rows = setup.sizes.batches[0]
    run = run_of(loaded, rows)
    sampled = []
    for way, each in (
        ("one by one", [replace(step, follows=None) for step in run]),
        ("in a run", run),
    ):
        sampled.append([loaded.runner.run(step).tolist() for step in each])
        ms = 1e3 * seconds_ahead(loaded.runner, each * setup.sizes.few)
        report.figure(f"{rows} decodes {way}: back to back", ms, "ms")
    assert sampled[0] == sampled[1]


@pytest.fixture(scope="module")
def two_layers(setup: Setup, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "two-layers"
    shape = REHEARSED_MODEL if setup.rehearse else TWO_LAYERS
    make = [sys.executable, "-m", "tools.make_model", *shape, "--out", str(path)]
    subprocess.run(make, cwd=ROOT, check=True)
    return path


@pytest.mark.parametrize("quantization", ["none", "fp8", "int4"])
def measure_few_bits(setup: Setup, report: Report, two_layers: Path, quantization: str) -> None:
    """Decodes with weights of two layers of the 8B shape in fewer bits."""
    setup, sizes = replace(setup, model=two_layers), setup.sizes
    few, many, context = sizes.batches[0], sizes.batches[-1], sizes.contexts[0]
    settings = setup.settings(
        quantization=quantization, max_num_seqs=many, max_model_len=sizes.max_model_len
    )
    started = time.perf_counter()
    runner = ModelRunner(settings, setup.platform(settings))
    report.figure(f"{quantization}: loaded", time.perf_counter() - started, "s")
    size = runner.info.paging.block_size
    runner.configure(1, blocks_needed([context] * many, size))
    for rows in (few, many):
        step = make_step([1] * rows, [context] * rows, size, runner.info.vocab_size)
        runner.run(step)
        ms = 1e3 * seconds_ahead(runner, [step] * sizes.repeats)
        name = f"two layers, {rows} decodes"
        if quantization == "none":
            report.figure(f"{name}, bf16", ms, "ms")
        else:
            report.figure(f"{name}, {quantization}", ms, "ms", report.value(f"{name}, bf16"))


@pytest.mark.parametrize("model", sorted({f.parent for f in WEIGHTS}), ids=lambda path: path.name)
def measure_trained(setup: Setup, report: Report, model: Path) -> None:
    """Compares the models in models/, which are trained, with transformers."""
    setup = replace(setup, model=model)
    settings = setup.settings(max_num_seqs=PROMPTS)
    runner = ModelRunner(settings, setup.platform(settings))
    num_blocks = blocks_needed([setup.sizes.contexts[0]] * PROMPTS, runner.info.paging.block_size)
    runner.configure(1, num_blocks)
    against_transformers(setup, report, model.name, runner, num_blocks)


def measure_against_transformers(setup: Setup, report: Report, loaded: Loaded) -> None:
    against_transformers(setup, report, "model", loaded.runner, loaded.num_blocks)


def against_transformers(
    setup: Setup, report: Report, name: str, runner: ModelRunner, num_blocks: int
) -> None:
    from transformers import AutoModelForCausalLM

    texts, tokens = greedy(setup, runner, num_blocks)
    oracle = AutoModelForCausalLM.from_pretrained(setup.model, dtype=setup.dtype)
    oracle = oracle.to(setup.device).eval()
    logits = []
    for text, made in zip(texts, np.stack(tokens, 1), strict=True):
        ids = torch.from_numpy(np.concatenate((text, made[:-1]))).long().to(setup.device)
        with torch.inference_mode():
            logits.append(oracle(ids[None]).logits[0, len(text) - 1 :])
    compare(report, f"{name} against transformers", torch.stack(logits), tokens)


# By number: see `step_speed.measure_step`.
@pytest.mark.parametrize("number", range(7))
def measure_step(setup: Setup, report: Report, loaded: Loaded, number: int) -> None:
    step_speed.measure_step(setup, report, loaded, number)


def measure_attention(setup: Setup, report: Report) -> None:
    label, heads = setup.sizes.heads[0]
    for rows in setup.sizes.batches:
        report_rate(setup, report, label, heads, [setup.sizes.contexts[0]] * rows)


def greedy(setup: Setup, runner: ModelRunner, num_blocks: int) -> tuple[list[Int32s], list[Int32s]]:
    """Returns random prompts, and the tokens [S] that each step samples for them."""
    rng = np.random.default_rng(setup.seed)
    rows = min(PROMPTS, setup.sizes.workload.num_seqs)
    longest, vocab = setup.sizes.contexts[0] // 2, runner.info.vocab_size
    lengths = rng.integers(1, longest, rows, endpoint=True)
    texts = [rng.integers(vocab, size=length, dtype=np.int32) for length in lengths]
    tokens: list[Int32s] = []
    # iter yields what is appended
    for step in steps(setup, runner, num_blocks, texts, iter(tokens)):
        tokens.append(runner.run(step))
    return texts, tokens


def steps(
    setup: Setup,
    runner: ModelRunner,
    num_blocks: int,
    texts: list[Int32s],
    tokens: Iterator[Int32s],
) -> Iterator[StepArrays]:
    """Yields the step of the prompts, then the steps of the decodes."""
    sequences = Sequences(runner.info.paging.block_size, range(num_blocks), seed=0)
    yield sequences.step(dict(enumerate(texts)))
    for _ in range(setup.sizes.greedy_tokens - 1):
        yield sequences.step({row: token[None] for row, token in enumerate(next(tokens))})


def run_of(loaded: Loaded, rows: int) -> list[StepArrays]:
    """Makes a run of decodes, whose steps have the blocks of its last one."""
    info, context = loaded.runner.info, loaded.setup.sizes.contexts[0]
    sequences = Sequences(info.paging.block_size, range(loaded.num_blocks), seed=0)
    sequences.step({row: np.zeros(context - MAX_RUN, np.int32) for row in range(rows)})
    steps = [sequences.step({row: np.ones(1, np.int32) for row in range(rows)})]
    for _ in range(1, MAX_RUN):
        steps.append(sequences.step({row: np.array([-1 - row], np.int32) for row in range(rows)}))
    table, offsets = steps[-1].block_table, steps[-1].block_table_offsets
    run = [replace(steps[0], block_table=table, block_table_offsets=offsets)]
    for step in steps[1:]:
        run.append(replace(step, block_table=table, block_table_offsets=offsets, follows=run[-1]))
    return run


def seconds_ahead(runner: ModelRunner, steps: Sequence[StepArrays]) -> float:
    """Launches steps one ahead, as the service does -> the seconds of one."""
    pending = deque([runner.launch(steps[0])])
    started = time.perf_counter()
    for step in steps[1:]:
        pending.append(runner.launch(step))
        pending.popleft().wait()
    pending.pop().wait()
    return (time.perf_counter() - started) / len(steps)


def compare(report: Report, name: str, logits: torch.Tensor, tokens: list[Int32s]) -> None:
    """Compares logits [S, N, vocabulary or more] with the tokens [S] of N steps."""
    chosen = torch.from_numpy(np.stack(tokens, 1)).long().to(logits.device)
    logits = logits.float()
    top = logits.amax(2)
    gaps = (top - logits.gather(2, chosen[:, :, None])[:, :, 0]) / (top - logits.mean(2))
    equal, worst = int((gaps == 0).sum()), float(gaps.max())
    report.figure(f"{name}: equal tokens", equal, "tokens", gaps.numel())
    report.figure(f"{name}: largest gap", worst, f"(up to {TOLERANCE})")
    assert worst <= TOLERANCE, f"{name}: gaps {gaps.tolist()}"
