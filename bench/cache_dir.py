"""`python -m bench --mode cache-dir`: what a directory under the KV cache saves.

It measures the first token of conversations that return after a restart, with the directory's files
in the page cache and without, a workload whose contexts take a multiple of the cache, and one that
finds nothing. Each is paired with a stack that has no directory.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.report import check_minimum, mode_parser, print_table
from bench.stack import PLAIN, private_stack
from nano_vllm_grpc import LLM, PrivateStack, SamplingParams

_TOKENS = 16  # of each answer
_TURN = 8  # tokens that a client adds in a turn


def parse_args(args: Sequence[str]) -> argparse.Namespace:
    parser = mode_parser("cache-dir", __doc__)
    parser.add_argument("--conversations", type=int, default=8, help="%(default)s")
    parser.add_argument("--tokens", type=int, default=1000, help="of each; %(default)s")
    parser.add_argument("--factor", type=float, default=2.0, help="contexts per cache; %(default)s")
    parser.add_argument("--turns", type=int, default=3, help="%(default)s")
    parser.add_argument("--streams", type=int, default=4, help="at once; %(default)s")
    parser.add_argument("--quantization", default="int8", help="%(default)s")
    parser.add_argument("--kv-dtype", default="int8", help="%(default)s")
    options = parser.parse_args(args)
    check_minimum(parser, options, 1, ("conversations", "tokens", "turns", "streams"))
    return options


def measure(options: argparse.Namespace, console: Console) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="blocks-") as directory:
        bench = _Bench(options, console, Path(directory))
        figures = {"returning": bench.returning()}
        yield figures
        figures["pressure"] = bench.pressure()
        yield figures
        figures["cost"] = bench.cost()
        yield figures
    for title, name in (
        ("first token of a returning conversation, s", "returning"),
        ("contexts beyond the cache, tokens/s", "pressure"),
        ("32 new prompts, tokens/s", "cost"),
    ):
        rows = [[each, f"{value:.3g}"] for each, value in figures[name].items()]
        print_table(console, title, ("", "median"), rows)


class _Bench:
    def __init__(self, options: argparse.Namespace, console: Console, directory: Path) -> None:
        self._options, self._console, self._directory = options, console, directory
        rng = random.Random(0)
        self._prompts = [
            [rng.randrange(10, 1000) for _ in range(options.tokens)]
            for _ in range(options.conversations)
        ]

    def _stack(self, stack: ExitStack, *, tier: bool, **options: Any) -> LLM:
        if tier:
            options["cache_dir"] = self._directory
        variables = {
            "quantization": self._options.quantization,
            "kv_dtype": self._options.kv_dtype,
            **options,
        }
        running: PrivateStack = stack.enter_context(
            private_stack(self._options.model, self._console, **variables)
        )
        return stack.enter_context(LLM(running.address))

    def returning(self) -> dict[str, float]:
        """Medians of the time to the first token, one conversation after another."""
        found = {}
        with ExitStack() as stack:
            llm = self._stack(stack, tier=True, cache_dir_mb_per_s=1e6)
            for prompt in self._prompts:
                _first_token_s(llm, prompt)
            self._wait_for_files()
        for name in ("computed", "page cache", "disk"):
            if name == "disk":
                self._drop_pages()
            with ExitStack() as stack:
                llm = self._stack(stack, tier=name != "computed")
                _first_token_s(llm, [5] * 32)  # no prompt is the first of its process
                times = [_first_token_s(llm, [*prompt, *range(_TURN)]) for prompt in self._prompts]
            found[name] = statistics.median(times)
        return found

    def pressure(self) -> dict[str, float]:
        """Tokens per second of clients that take turns, with `factor` times the cache's contexts.
        Computed tokens do not count, but those that clients receive."""
        options, found = self._options, {}
        longest = options.tokens + options.turns * (_TURN + _TOKENS)
        blocks = int(options.conversations * longest / options.factor / 16)
        for tier in (False, True):
            with ExitStack() as stack:
                llm = self._stack(stack, tier=tier, kv_blocks=blocks, block_size=16)
                _first_token_s(llm, [5] * 32)
                contexts = [[7, *prompt] for prompt in self._prompts]
                for prompt in contexts:
                    _first_token_s(llm, prompt)
                began = time.perf_counter()
                for turn in range(options.turns):
                    for prompt in contexts:
                        prompt += range(turn, turn + _TURN)
                    answers = _answers(llm, contexts, _TOKENS, options.streams)
                    for prompt, answer in zip(contexts, answers, strict=True):
                        prompt += answer
                seconds = time.perf_counter() - began
            num_tokens = options.turns * len(contexts) * _TOKENS
            found["with the directory" if tier else "computed"] = num_tokens / seconds
        return found

    def cost(self) -> dict[str, float]:
        """Tokens per second of 32 streams that find nothing in the directory, medians of 3."""
        rng, found = random.Random(1), {}
        for tier in (False, True):
            with ExitStack() as stack:
                llm = self._stack(stack, tier=tier)
                rates = []
                for _ in range(3):
                    prompts = [[rng.randrange(10, 1000) for _ in range(256)] for _ in range(32)]
                    began = time.perf_counter()
                    answers = _answers(llm, prompts, 64, len(prompts))
                    rates.append(sum(map(len, answers)) / (time.perf_counter() - began))
                found["with the directory" if tier else "without"] = statistics.median(rates)
        return found

    def _wait_for_files(self) -> None:
        """Waits until nothing is written any more."""
        size = -1
        while size != (size := sum(path.stat().st_size for path in self._files())):
            time.sleep(0.5)

    def _drop_pages(self) -> None:
        for path in self._files():
            number = os.open(path, os.O_RDONLY)
            os.fsync(number)
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(number)

    def _files(self) -> list[Path]:
        return [path for path in self._directory.rglob("*") if path.is_file()]


def _params(num_tokens: int) -> SamplingParams:
    return replace(PLAIN, temperature=0, max_tokens=num_tokens, ignore_eos=True)


def _first_token_s(llm: LLM, prompt: list[int]) -> float:
    began = time.perf_counter()
    for _ in llm.stream(prompt, _params(1)):
        return time.perf_counter() - began
    raise AssertionError("no token")


def _answers(
    llm: LLM, prompts: Sequence[list[int]], num_tokens: int, at_once: int
) -> list[list[int]]:
    def answer(prompt: list[int]) -> list[int]:
        chunks = llm.stream(prompt, _params(num_tokens))
        return [token for chunk in chunks for token in chunk.token_ids]

    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(answer, prompts))
