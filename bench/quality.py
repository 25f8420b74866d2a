"""`python -m bench --mode quality`: measures what each format of weights and KV cache loses.

All variants read the same text, by default this project's documents, in windows of equal length.
Each is compared with the first, which is float32 without quantization. See docs/results/quality.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from bench.gpu.steps import Sequences, blocks_needed
from bench.report import check_minimum, mode_parser, print_table
from bench.workload import DOCUMENTS, BenchError, read_tokens
from deploy.model import resolve_model
from shared.config import load_settings
from worker_svc.model_runner import ModelRunner
from worker_svc.settings import WorkerSettings
from worker_svc.step.wire import Int32s

RESAMPLES = 2000
_ROWS = 128  # whose log-probabilities are in memory at once, in float64

Interval = tuple[float, float]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Variant:
    """Settings of a worker."""

    dtype: str
    quantization: str
    kv_dtype: str


VARIANTS = {
    "float32": Variant("float32", "none", "auto"),
    "bfloat16": Variant("bfloat16", "none", "auto"),
    "int8": Variant("float32", "int8", "auto"),
    "int4": Variant("float32", "int4", "auto"),
    "fp8": Variant("float32", "fp8", "auto"),
    "float32, KV int8": Variant("float32", "none", "int8"),
    "int8, KV int8": Variant("float32", "int8", "int8"),
    "int4, KV int8": Variant("float32", "int4", "int8"),
}
REFERENCE = "float32"


@dataclass(frozen=True)
class Quality:
    """A variant's figures on the text, with intervals of 95 %.

    The divergence is KL(reference || variant) of the next token's distributions, in nats.
    """

    name: str
    settings: Variant
    perplexity: float
    perplexity_interval: Interval
    change: float  # of the perplexity, as a share of the reference's
    change_interval: Interval
    divergence: float  # mean of all positions
    divergence_interval: Interval
    divergence_p99: float
    same_greedy_token: float  # share of positions


class Reader:
    """A model in one variant, run by the worker's code in this process, without gRPC.

    Raises:
        StartError: the model or its settings cannot be served.
    """

    def __init__(self, model: Path, variant: Variant, context: int) -> None:
        flags = {
            "--model": model,
            "--dtype": variant.dtype,
            "--quantization": variant.quantization,
            "--kv-dtype": variant.kv_dtype,
            "--max-num-seqs": 1,
            "--max-num-batched-tokens": context,
        }
        args = [str(part) for pair in flags.items() for part in pair]
        self._runner = ModelRunner(load_settings(WorkerSettings, args))
        paging = self._runner.info.paging
        self._size = paging.part_size
        num_blocks, num_parts = blocks_needed([context], self._size), paging.num_parts
        self._blocks = range(0, num_blocks * num_parts, num_parts)  # the first parts of each block
        self._runner.configure(1, num_blocks)

    def logits(self, window: Int32s) -> torch.Tensor:
        """The logits after every token of a window [N] -> [N, vocab]."""
        step = Sequences(self._size, self._blocks, seed=0).step({0: window})
        logits = self._runner.logits(step, every_token=True)
        return logits[:, : self._runner.info.vocab_size]


@dataclass(frozen=True)
class Scores:
    """A variant's numbers for every position of a window [N], or of windows [W, N]."""

    losses: Floats  # -log of the next token's probability; N - 1 per window
    divergences: Floats
    same: NDArray[np.bool_]  # whether the likeliest token is the reference's


def score(logits: Sequence[torch.Tensor], window: Int32s) -> list[Scores]:
    """Compares the logits of several variants, each [N, vocab], with those of the first."""
    following = torch.from_numpy(np.append(window[1:], 0)).long()
    parts: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in logits]
    for first in range(0, len(window), _ROWS):
        rows = slice(first, first + _ROWS)
        logprobs = [each[rows].double().log_softmax(1) for each in logits]
        reference = logprobs[0]
        shares, likeliest = reference.exp(), reference.argmax(1)
        for part, other in zip(parts, logprobs, strict=True):
            losses = -other.gather(1, following[rows, None])[:, 0]
            divergences = (shares * (reference - other)).sum(1)
            part.append((losses, divergences, likeliest == other.argmax(1)))
    columns = [[torch.cat(column).numpy() for column in zip(*part, strict=True)] for part in parts]
    return [Scores(losses[:-1], *others) for losses, *others in columns]


def stacked(scores: Sequence[Scores]) -> Scores:
    fields = [field.name for field in dataclasses.fields(Scores)]
    return Scores(*(np.stack([getattr(each, name) for each in scores]) for name in fields))


def interval(means: Floats, seed: int) -> Interval:
    """The interval of the mean of the means of equal windows [W]: the percentiles of the means of
    windows drawn again with replacement (Efron, 1979)."""
    drawn = np.random.default_rng(seed).integers(len(means), size=(RESAMPLES, len(means)))
    low, high = np.percentile(means[drawn].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


def summarize(name: str, scores: Scores, reference: Scores, seed: int) -> Quality:
    losses, divergences = scores.losses.mean(1), scores.divergences.mean(1)
    changes = losses - reference.losses.mean(1)
    low, high = np.exp(interval(losses, seed))
    less, more = np.expm1(interval(changes, seed))
    return Quality(
        name=name,
        settings=VARIANTS[name],
        perplexity=float(np.exp(losses.mean())),
        perplexity_interval=(float(low), float(high)),
        change=float(np.expm1(changes.mean())),
        change_interval=(float(less), float(more)),
        divergence=float(divergences.mean()),
        divergence_interval=interval(divergences, seed),
        divergence_p99=float(np.percentile(scores.divergences, 99)),
        same_greedy_token=float(scores.same.mean()),
    )


def compare(
    model: Path, names: Sequence[str], windows: Sequence[Int32s], seed: int
) -> list[Quality]:
    """Measures variants on windows of equal length; the first variant is the reference.

    Raises:
        StartError: this machine cannot serve a variant.
    """
    readers = {name: Reader(model, VARIANTS[name], len(windows[0])) for name in names}
    scores: dict[str, list[Scores]] = {name: [] for name in names}
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # the workers' code leaves one
    for number, window in enumerate(windows, 1):
        logits = [reader.logits(window) for reader in readers.values()]
        for each, part in zip(scores.values(), score(logits, window), strict=True):
            each.append(part)
        print(f"{number} of {len(windows)} windows", file=sys.stderr)
    found = {name: stacked(each) for name, each in scores.items()}
    return [summarize(name, found[name], found[names[0]], seed) for name in names]


def print_qualities(console: Console, qualities: Sequence[Quality], positions: int) -> None:
    """Prints changes in % and divergences in thousandths of a nat, each with its interval."""
    rows = [
        [
            each.name,
            _with_interval(each.perplexity, each.perplexity_interval, 1, "{:.2f}"),
            _with_interval(each.change, each.change_interval, 100, "{:+.2f}"),
            _with_interval(each.divergence, each.divergence_interval, 1000, "{:.3g}"),
            f"{1000 * each.divergence_p99:.3g}",
            f"{each.same_greedy_token:.2%}",
        ]
        for each in qualities
    ]
    columns = ["", "perplexity", "change in %", "KL: mean", "99th percentile", "same greedy token"]
    print_table(console, f"{positions:,} tokens, compared with {REFERENCE}", columns, rows)


def _with_interval(value: float, bounds: Interval, factor: int, pattern: str) -> str:
    middle, low, high = (pattern.format(factor * each) for each in (value, *bounds))
    return f"{middle} ({low} to {high})"


def parse_args(args: list[str]) -> argparse.Namespace:
    parser = mode_parser("quality", __doc__, "smollm2")
    parser.add_argument("--texts", nargs="+", type=Path, default=DOCUMENTS, metavar="FILE",
                        help="default: this project's documents")  # fmt: skip
    parser.add_argument("--context", type=int, default=1024, help="tokens of a window; %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the intervals; %(default)s")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=VARIANTS, metavar="NAME",
                        help=f"besides {REFERENCE}; default: {', '.join(VARIANTS)}")  # fmt: skip
    options = parser.parse_args(args)
    check_minimum(parser, options, 2, ["context"])
    return options


def measure(options: argparse.Namespace, console: Console) -> Iterator[dict[str, Any]]:
    """Yields the figures of all variants.

    Raises:
        BenchError: the text is shorter than a window.
        LaunchError, StartError: there is no such model, or this machine cannot serve a variant.
        OSError: a text cannot be read.
    """
    model = resolve_model(options.model)
    tokens = np.array(read_tokens(model, options.texts), np.int32)
    size = options.context
    windows = [tokens[end - size : end] for end in range(size, len(tokens) + 1, size)]
    if not windows:
        raise BenchError(f"--texts: fewer than {size} tokens")
    names = [REFERENCE, *(name for name in options.only if name != REFERENCE)]
    qualities = compare(model, names, windows, options.seed)
    print_qualities(console, qualities, size * len(windows))
    yield {
        "model": options.model,
        "tokens": size * len(windows),
        "context": size,
        "reference": REFERENCE,
        "variants": [dataclasses.asdict(each) for each in qualities],
    }
