"""Shows where the time of a worker's step goes on a CPU, against what the machine could do.

    python -m bench.profile_step --model DIR [--threads N] [--quantization int8] [--kv-dtype int8]
        [--out FILE.json]

For decodes of 1, 8, 32 and 256 sequences, prompts of 128 and 1,024 tokens and mixed steps, prints
the time of each kind of work in all layers, and its limit: the larger of the bytes it has to read
over the memory's bandwidth and of its operations over the rate of the instructions that it uses,
both measured before. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median
from typing import Any, cast

import numba
import numpy as np
import torch
from numba import njit, prange

from bench.machine import this_machine
from shared.config import load_settings
from worker_svc.attention.cpu_backend import CpuBackend
from worker_svc.kernels.cpu import ops as cpu_ops
from worker_svc.kernels.ops import PackedWeight
from worker_svc.layers.embedding import VocabParallelEmbedding
from worker_svc.layers.norm import RMSNorm
from worker_svc.model_runner import ModelRunner
from worker_svc.sampling.sampler import Sampler
from worker_svc.settings import WorkerSettings
from worker_svc.step.decode import Step
from worker_svc.weights.quantization.formats import Format, QuantizedWeight
from worker_svc.weights.quantization.quantize import quantize

CONTEXT = 280
# Sequences of one token at `CONTEXT`, and the length of a new prompt beside them.
STEPS = [(1, 0), (8, 0), (32, 0), (256, 0), (0, 128), (0, 1024), (31, 128), (8, 512)]
READ_BYTES = 1 << 28
# Products that stay in the caches, to measure the rate of their instructions.
TOKENS, WIDTH = 480, 1024


@dataclasses.dataclass
class Part:
    """The work of one kind in a step; limits are in seconds."""

    seconds: float = 0.0
    bytes: int = 0
    operations: int = 0


class Parts:
    """Times what functions do by wrapping them."""

    def __init__(self) -> None:
        self.parts: dict[str, Part] = defaultdict(Part)
        self.overhead = 0.0  # seconds that it took to count work

    def wrap(
        self,
        owner: Any,
        name: str,
        part: str,
        work: Callable[..., tuple[int, int]] = lambda *args: (0, 0),
    ) -> None:
        """`work` of the call's arguments -> bytes to read, operations."""
        function: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = function(*args, **kwargs)
            ended = time.perf_counter()
            size, operations = work(*args)
            done = self.parts[part]
            done.seconds += ended - started
            done.bytes += size
            done.operations += operations
            self.overhead += time.perf_counter() - ended
            return result

        setattr(owner, name, timed)

    def wrap_weight(self, weight: PackedWeight, part: str) -> None:
        state = weight.state()
        size = sum(tensor.nbytes for tensor in state.values())
        shape = state["shape"].tolist() if "shape" in state else state["weight"].shape
        self.wrap(
            weight, "matmul", part, lambda x, *_: (size, 2 * len(x) * int(shape[0] * shape[1]))
        )

    def wrap_runner(self, runner: ModelRunner) -> None:
        model, backend = runner._model, runner._backend
        for layer in model.layers:
            self.wrap_weight(layer.attention.qkv_proj._weight, "qkv")
            self.wrap_weight(layer.attention.o_proj._weight, "output")
            self.wrap_weight(layer.mlp.gate_up_proj._weight, "gate and up")
            self.wrap_weight(layer.mlp.down_proj._weight, "down")
        self.wrap_weight(model.lm_head._weight, "head")
        shape = backend.shape
        of_token = shape.cache_bytes_per_token // shape.num_layers

        def attention(_self: Any, _q: Any, _cache: Any, plan: Any) -> tuple[int, int]:
            lens = np.diff(plan.query_starts)
            seen = lens * plan.context_lens - lens * (lens - 1) // 2
            operations = 4 * int(seen.sum()) * shape.num_heads * shape.head_dim
            return int(plan.context_lens.sum()) * of_token, operations

        self.wrap(CpuBackend, "attend", "attention", attention)
        self.wrap(CpuBackend, "rope_store", "norm, rope, cache write")
        self.wrap(RMSNorm, "__call__", "norm")
        self.wrap(cpu_ops, "silu_and_multiply", "SiLU")
        self.wrap(VocabParallelEmbedding, "__call__", "embedding")
        self.wrap(Sampler, "__call__", "sampler")


@dataclasses.dataclass(frozen=True)
class Limits:
    bytes_per_s: float
    operations_per_s: float  # of products
    attention_operations_per_s: float

    @staticmethod
    def measure(dtype: torch.dtype, quantization: str, kv_dtype: str) -> Limits:
        threads = numba.get_num_threads()
        memory = np.ones(READ_BYTES // 8)
        weight = torch.randn(WIDTH, WIDTH)
        packed: torch.Tensor | QuantizedWeight = weight.to(dtype)
        if quantization in ("int8", "int4", "fp8"):
            packed = quantize(weight, cast(Format, quantization))
        product = cpu_ops.pack(packed, dtype)
        # Queries and weights of 16 bits take two products of codes.
        share = 2 if kv_dtype == "int8" else 1
        cached = quantize(weight, "int8") if kv_dtype == "int8" else weight.to(dtype)
        attention = cpu_ops.pack(cached, dtype)
        x = torch.randn(TOKENS, WIDTH)
        operations = 2 * TOKENS * WIDTH * WIDTH
        return Limits(
            READ_BYTES / _best(lambda: _read(memory, threads)),
            operations / _best(lambda: product.matmul(x, None)),
            operations / share / _best(lambda: attention.matmul(x, None)),
        )

    def seconds(self, name: str, part: Part) -> float:
        rate = self.attention_operations_per_s if name == "attention" else self.operations_per_s
        return max(part.bytes / self.bytes_per_s, part.operations / rate)


@njit(parallel=True, fastmath=True)  # type: ignore[untyped-decorator]
def _read(memory: Any, threads: int) -> float:
    total = 0.0
    for thread in prange(threads):
        part = memory[len(memory) * thread // threads : len(memory) * (thread + 1) // threads]
        total += part.sum()
    return total


def _best(run: Callable[[], object]) -> float:
    run()
    seconds = []
    for _ in range(9):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def make_step(runner: ModelRunner, decodes: int, prompt: int) -> Step:
    """Makes a step of `decodes` sequences at `CONTEXT` and of a prompt, if that is not 0, each with
    blocks of its own."""
    size, rng = runner.info.block_size, np.random.default_rng(0)
    query_lens = np.array([1] * decodes + [prompt] * (prompt > 0), np.int32)
    context_lens = np.array([CONTEXT] * decodes + [prompt] * (prompt > 0), np.int32)
    ends = np.cumsum(-(-context_lens // size))
    offsets = np.concatenate(([0], ends)).astype(np.int32)
    positions = [
        np.arange(context - tokens, context)
        for tokens, context in zip(query_lens, context_lens, strict=True)
    ]
    slots = [first * size + p for first, p in zip(offsets[:-1], positions, strict=True)]
    num_seqs, num_tokens = len(query_lens), int(query_lens.sum())
    return Step(
        step_id=1,
        input_ids=rng.integers(runner.info.vocab_size, size=num_tokens, dtype=np.int32),
        positions=np.concatenate(positions).astype(np.int32),
        slot_mapping=np.concatenate(slots).astype(np.int32),
        query_lens=query_lens,
        context_lens=context_lens,
        block_table=np.arange(offsets[-1], dtype=np.int32),
        block_table_offsets=offsets,
        samples=np.ones(num_seqs, np.bool_),
        temperatures=np.full(num_seqs, 0.6, np.float32),
        seeds=np.arange(num_seqs, dtype=np.uint64),
    )


def profile(runner: ModelRunner, parts: Parts, limits: Limits, step: Step) -> dict[str, Any]:
    """Runs `step` until a second has gone, and prints the run of median time."""
    runner.run(step)
    runs: list[tuple[float, dict[str, Part]]] = []
    while not runs or (sum(seconds for seconds, _ in runs) < 1 or len(runs) < 3):
        parts.parts.clear()
        parts.overhead = 0.0
        started = time.perf_counter()
        runner.run(step)
        seconds = time.perf_counter() - started - parts.overhead
        runs.append((seconds, dict(parts.parts)))
    total = median(seconds for seconds, _ in runs[: len(runs) - 1 + len(runs) % 2])
    kinds = next(kinds for seconds, kinds in runs if seconds == total)
    rest = total - sum(part.seconds for part in kinds.values())
    kinds |= {"plan, upload, Python": Part(rest)}
    rows = {name: (part.seconds, limits.seconds(name, part)) for name, part in kinds.items()}
    bound = sum(limit for _, limit in rows.values())
    print(f"{'all':<26}{1e3 * total:10.2f} ms {1e3 * bound:10.2f} ms {100 * bound / total:6.0f} %")
    for name, (seconds, limit) in sorted(rows.items(), key=lambda row: -row[1][0]):
        against = f"{1e3 * limit:10.2f} ms {100 * limit / seconds:6.0f} %" if limit else ""
        print(f"  {name:<24}{1e3 * seconds:10.2f} ms {against}")
    return {
        "seconds": total,
        "limit_s": bound,
        "parts": {name: {"seconds": s, "limit_s": limit} for name, (s, limit) in rows.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.profile_step")
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", default="auto")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--out")
    args = parser.parse_args()
    flags = ["--device", "cpu", "--max-num-seqs", "256", "--model", args.model]
    for name in ("threads", "quantization", "kv_dtype"):
        flags += [f"--{name.replace('_', '-')}", getattr(args, name)]
    runner = ModelRunner(load_settings(WorkerSettings, flags))
    blocks = max(seqs * -(-CONTEXT // runner.info.block_size) for seqs, _ in STEPS)
    runner.configure(1, blocks + 1024)
    limits = Limits.measure(getattr(torch, runner.info.dtype), args.quantization, args.kv_dtype)
    print(
        f"reads {limits.bytes_per_s / 1e9:.1f} GB/s, products {limits.operations_per_s / 1e9:.0f} "
        f"and attention {limits.attention_operations_per_s / 1e9:.0f} billion operations/s"
    )
    parts = Parts()
    parts.wrap_runner(runner)
    results = {}
    for decodes, prompt in STEPS:
        title = " and ".join(
            ([f"{decodes} decodes"] if decodes else []) + ([f"{prompt} tokens"] if prompt else [])
        )
        print(f"\n{title:<32}time          limit   reached")
        results[title] = profile(runner, parts, limits, make_step(runner, decodes, prompt))
    if args.out:
        result = {
            **dataclasses.asdict(this_machine()),
            "flags": flags,
            "limits": dataclasses.asdict(limits),
            "steps": results,
        }
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=2)


if __name__ == "__main__":
    main()
