"""The first parts of the smoke run: first the GPU and its software without a model, then a model.
The first tests help to understand why a later one fails."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from statistics import median

import numpy as np
import pytest
import torch

from bench.gpu import step_speed
from bench.gpu.attention_speed import report_rate
from bench.gpu.ceilings_speed import bandwidth
from bench.gpu.records import Report
from bench.gpu.setup import Setup
from bench.gpu.step_speed import Loaded
from bench.gpu.steps import Sequences
from shared.graph_sizes import graph_size
from worker_svc.step.arrays import StepArrays
from worker_svc.step.wire import Int32s

PROMPTS = 8
# The maximum distance of a token's logit below the largest logit, as a share of the largest less
# the mean. In bfloat16, rounding decides near ties. A wrong token's share is near 1.
TOLERANCE = 0.05

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
    texts, tokens = greedy(setup, loaded)
    logits = [loaded.runner.logits(step) for step in steps(loaded, texts, iter(tokens))]
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


def measure_against_transformers(setup: Setup, report: Report, loaded: Loaded) -> None:
    from transformers import AutoModelForCausalLM

    texts, tokens = greedy(setup, loaded)
    oracle = AutoModelForCausalLM.from_pretrained(setup.model, dtype=setup.dtype)
    oracle = oracle.to(setup.device).eval()
    logits = []
    for text, made in zip(texts, np.stack(tokens, 1), strict=True):
        ids = torch.from_numpy(np.concatenate((text, made[:-1]))).long().to(setup.device)
        with torch.inference_mode():
            logits.append(oracle(ids[None]).logits[0, len(text) - 1 :])
    compare(report, "against transformers", torch.stack(logits), tokens)


# By number: see `step_speed.measure_step`.
@pytest.mark.parametrize("number", range(7))
def measure_step(setup: Setup, report: Report, loaded: Loaded, number: int) -> None:
    step_speed.measure_step(setup, report, loaded, number)


def measure_attention(setup: Setup, report: Report) -> None:
    label, heads = setup.sizes.heads[0]
    for rows in setup.sizes.batches:
        report_rate(setup, report, label, heads, [setup.sizes.contexts[0]] * rows)


def greedy(setup: Setup, loaded: Loaded) -> tuple[list[Int32s], list[Int32s]]:
    """Returns random prompts, and the tokens [S] that each step samples for them."""
    rng = np.random.default_rng(setup.seed)
    rows = min(PROMPTS, setup.sizes.workload.num_seqs)
    longest, vocab = setup.sizes.contexts[0] // 2, loaded.runner.info.vocab_size
    lengths = rng.integers(1, longest, rows, endpoint=True)
    texts = [rng.integers(vocab, size=length, dtype=np.int32) for length in lengths]
    tokens: list[Int32s] = []
    for step in steps(loaded, texts, iter(tokens)):  # iter yields what is appended
        tokens.append(loaded.runner.run(step))
    return texts, tokens


def steps(loaded: Loaded, texts: list[Int32s], tokens: Iterator[Int32s]) -> Iterator[StepArrays]:
    """Yields the step of the prompts, then the steps of the decodes."""
    size = loaded.runner.info.block_size
    sequences = Sequences(size, range(loaded.num_blocks), seed=0)
    yield sequences.step(dict(enumerate(texts)))
    for _ in range(loaded.setup.sizes.greedy_tokens - 1):
        yield sequences.step({row: token[None] for row, token in enumerate(next(tokens))})


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
