"""Where the time of a worker's step goes.

    python -m bench.profile_step --model DIR [--threads 1]

Prints, for one decode, for many and for a prompt, the CPU time of a step and of each part of it.
CPU time, because it hardly depends on what else the machine does; with `--threads 1` it is what the
step takes on one idle core.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from shared.config import load_settings
from worker_svc.attention import torch_backend
from worker_svc.kernels.cpu import fused as cpu_fused
from worker_svc.kernels.cpu import linear as cpu_linear
from worker_svc.model_runner import ModelRunner
from worker_svc.sampling.sampler import Sampler
from worker_svc.settings import WorkerSettings
from worker_svc.step.decode import Step

NUM_BLOCKS = 1024
REPEATS = 5


class PartTimes:
    """CPU seconds per part, by wrapping the functions that do the work."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def wrap(self, owner: Any, name: str, part: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[part] += time.process_time() - started

        setattr(owner, name, timed)


def make_step(runner: ModelRunner, rows: int, query_len: int, context_len: int) -> Step:
    """`rows` sequences alike, each with blocks of its own."""
    size = runner.info.block_size
    blocks = -(-context_len // size)
    positions = np.arange(context_len - query_len, context_len)
    tables = np.arange(rows * blocks).reshape(rows, blocks)
    rng = np.random.default_rng(0)
    return Step(
        step_id=1,
        input_ids=rng.integers(runner.info.vocab_size, size=rows * query_len, dtype=np.int32),
        positions=np.tile(positions, rows).astype(np.int32),
        slot_mapping=(tables[:, positions // size] * size + positions % size)
        .ravel()
        .astype(np.int32),
        query_lens=np.full(rows, query_len, np.int32),
        context_lens=np.full(rows, context_len, np.int32),
        block_table=tables.ravel().astype(np.int32),
        block_table_offsets=(np.arange(rows + 1) * blocks).astype(np.int32),
        samples=np.ones(rows, np.bool_),
        temperatures=np.full(rows, 0.6, np.float32),
        seeds=np.arange(rows, dtype=np.uint64),
    )


def profile(runner: ModelRunner, times: PartTimes, title: str, step: Step, repeats: int) -> None:
    runner.run(step)
    times.seconds.clear()
    totals = []
    for _ in range(repeats):
        started = time.process_time()
        runner.run(step)
        totals.append(time.process_time() - started)
    total = sum(totals) / repeats
    print(f"\n{title}: {1000 * total:.1f} ms (best {1000 * min(totals):.1f})")
    parts = {name: seconds / repeats for name, seconds in times.seconds.items()}
    parts["the rest"] = total - sum(parts.values())
    for name, seconds in sorted(parts.items(), key=lambda part: -part[1]):
        print(f"  {name:<24}{1000 * seconds:9.1f} ms {100 * seconds / total:5.1f} %")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.profile_step")
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    times = PartTimes()
    times.wrap(cpu_linear, "linear", "linear layers")
    times.wrap(torch_backend, "decode_attention", "decode attention")
    times.wrap(torch_backend, "write_cache", "cache write")
    times.wrap(torch_backend.TorchBackend, "_attend_chunk", "prompt attention")
    times.wrap(Sampler, "__call__", "sampler")
    for name in ("_rms_norm", "_add_rms_norm", "_norm_and_rotate", "_silu_and_multiply"):
        times.wrap(cpu_fused, name, "norms, rotary, silu")
    flags = ["--model", args.model, "--device", "cpu", "--threads", str(args.threads)]
    runner = ModelRunner(load_settings(WorkerSettings, flags))
    runner.configure(1, NUM_BLOCKS)
    profile(runner, times, "one decode, context 200", make_step(runner, 1, 1, 200), REPEATS)
    profile(runner, times, "32 decodes, context 280", make_step(runner, 32, 1, 280), REPEATS)
    profile(runner, times, "prompt of 1024", make_step(runner, 1, 1024, 1024), 1)


if __name__ == "__main__":
    main()
