"""`python -m bench --mode embeddings`: compares embedding here and by sentence-transformers.

All programs embed the same texts in turn, other texts in each round. Only one computes at a time.
See docs/results/peers.md.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from bench.peers.installed import HOME, ROOT, python
from bench.report import check_lengths, check_minimum, mode_parser, print_table
from bench.stack import private_stack
from bench.workload import BenchError, read_tokens
from deploy.model import model_name, resolve_model
from nano_vllm_grpc import LLM

# Of this server: the dtype and the quantization. Of the others: the backend, and what follows the
# model's name in .peers/models.
OURS = {"nano-float32": ("float32", "none"), "nano-int8": ("float32", "int8")}
OTHERS = {
    "torch-float32": ("torch", ""),
    "openvino-float32": ("openvino", "-embed-fp32"),
    "openvino-int8": ("openvino", "-embed-int8"),
}
_MAX_MODEL_LEN = 2048  # a cache for more would not fit beside the others
Embed = Callable[[Sequence[str]], tuple[float, list[list[float]]]]


def parse_args(args: list[str]) -> argparse.Namespace:
    names = [*OURS, *OTHERS]
    parser = mode_parser("embeddings", __doc__)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME",
                        help=f"default: {', '.join(names)}")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3, help="%(default)s")
    parser.add_argument("--texts", type=int, default=32, help="of a round; %(default)s")
    parser.add_argument("--min-input", type=int, default=32, help="tokens; %(default)s")
    parser.add_argument("--max-input", type=int, default=256, help="tokens; %(default)s")
    parser.add_argument("--batch-size", type=int, default=8,
                        help="of sentence-transformers; %(default)s")  # fmt: skip
    options = parser.parse_args(args)
    check_minimum(parser, options, 1, ["rounds", "texts", "batch_size"])
    check_lengths(parser, options, ["input"])
    return options


def measure(options: argparse.Namespace, console: Console) -> Iterator[dict[str, Any]]:
    """Yields all results after each round.

    Raises:
        BenchError: sentence-transformers or a converted model is missing, or a program failed.
        LaunchError: there is no such model, or a stack did not start.
    """
    from transformers import AutoTokenizer

    model = resolve_model(options.model).resolve()
    tokenizer, tokens = AutoTokenizer.from_pretrained(model), read_tokens(model)
    rates: dict[str, list[float]] = {name: [] for name in options.only}
    cosines: dict[str, list[float]] = {name: [] for name in options.only}
    versions: dict[str, str] = {}
    with ExitStack() as stack:
        programs: dict[str, Embed] = {}
        for name in options.only:
            if name in OURS:
                programs[name] = stack.enter_context(_ours(model, console, *OURS[name]))
            else:
                found = stack.enter_context(_other(model, *OTHERS[name], options.batch_size))
                programs[name] = found[0]
                versions |= found[1]
        for number in range(options.rounds + 1):  # the first round warms up
            rng, count = random.Random(number), options.texts if number else 2
            lengths = [rng.randint(options.min_input, options.max_input) for _ in range(count)]
            starts = [rng.randrange(len(tokens) - length) for length in lengths]
            texts = [
                tokenizer.decode(tokens[start : start + length]).strip()
                for start, length in zip(starts, lengths, strict=True)
            ]
            size = sum(len(tokenizer.encode(text)) for text in texts)
            first: list[list[float]] | None = None
            for name, embed in programs.items():
                seconds, vectors = embed(texts)
                first = first or vectors
                if number:
                    rates[name].append(size / seconds)
                    cosines[name].append((np.array(first) * vectors).sum(axis=1).min().item())
            if number:
                yield _results(options, model, versions, rates, cosines)
    rows = [
        [
            name,
            f"{statistics.median(each):.0f} ({min(each):.0f}–{max(each):.0f})",
            f"{min(cosines[name]):.6f}",
        ]
        for name, each in rates.items()
    ]
    columns = ["", "tokens/s", "least cosine to the first"]
    print_table(console, f"{options.texts} texts: medians (min–max)", columns, rows)


def _results(
    options: argparse.Namespace,
    model: Path,
    versions: dict[str, str],
    rates: dict[str, list[float]],
    cosines: dict[str, list[float]],
) -> dict[str, Any]:
    return {
        "model": model_name(options.model, model),
        "workload": {name: getattr(options, name) for name in ("texts", "min_input", "max_input")},
        "batch_size": options.batch_size,
        "peer_versions": versions,
        "entries": [
            {
                "name": name,
                "tokens_per_s": statistics.median(each),
                "rounds": each,
                "least_cosine_to_the_first": min(cosines[name]),
            }
            for name, each in rates.items()
        ],
    }


@contextmanager
def _ours(model: Path, console: Console, dtype: str, quantization: str) -> Iterator[Embed]:
    with (
        private_stack(
            model, console, dtype=dtype, quantization=quantization, max_model_len=_MAX_MODEL_LEN
        ) as stack,
        LLM(stack.address) as llm,
    ):

        def embed(texts: Sequence[str]) -> tuple[float, list[list[float]]]:
            start = time.perf_counter()
            vectors = llm.embed(texts)
            return time.perf_counter() - start, vectors

        yield embed


@contextmanager
def _other(
    model: Path, backend: str, suffix: str, batch_size: int
) -> Iterator[tuple[Embed, dict[str, str]]]:
    path = HOME / "models" / f"{model.name}{suffix}" if suffix else model
    if not path.exists():
        raise BenchError(f"{path} is missing; see docs/results/peers.md")
    module = "bench.peers.sentence_transformers"
    with subprocess.Popen(
        [python("openvino"), "-m", module, path, backend, str(batch_size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    ) as process:
        assert process.stdin
        assert process.stdout

        def read() -> Any:
            assert process.stdout
            if not (line := process.stdout.readline()):
                raise BenchError(f"{path.name}: sentence-transformers has ended")
            return json.loads(line)

        def embed(texts: Sequence[str]) -> tuple[float, list[list[float]]]:
            assert process.stdin
            process.stdin.write(json.dumps(list(texts)) + "\n")
            process.stdin.flush()
            seconds, vectors = read()
            return seconds, vectors

        try:
            yield embed, read()
        finally:
            process.stdin.close()
