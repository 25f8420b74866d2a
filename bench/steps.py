"""Measures a worker's steps on a CPU, in this process: decodes, prompts and mixed steps.

    python -m bench.steps --model DIR [--threads N] [--quantization int8] [--kv-dtype int8]
        [--out FILE.json]

Run it on an otherwise idle machine. docs/operations.md describes how to profile a running stack,
which shows where a step's time goes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from statistics import median

from bench.gpu.steps import make_step
from bench.machine import this_machine
from shared.config import load_settings
from worker_svc.model_runner import ModelRunner
from worker_svc.settings import WorkerSettings

CONTEXT = 280
# The number of decoding sequences at `CONTEXT`, and the length of a new prompt beside them.
STEPS = ((1, 0), (8, 0), (32, 0), (256, 0), (0, 128), (0, 1024), (31, 128), (8, 512))
_MIN_S, _MIN_RUNS = 1.0, 3


def measure(runner: ModelRunner, decodes: int, prompt: int) -> float:
    """The median seconds of a step, from runs that together take at least a second."""
    prompts = [prompt] if prompt else []
    info = runner.info
    step = make_step(
        [1] * decodes + prompts, [CONTEXT] * decodes + prompts, info.block_size, info.vocab_size
    )
    runner.run(step)
    runs: list[float] = []
    while sum(runs) < _MIN_S or len(runs) < _MIN_RUNS:
        started = time.perf_counter()
        runner.run(step)
        runs.append(time.perf_counter() - started)
    return median(runs)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.steps", description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", default="auto")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--out", type=Path, help="for the JSON")
    args = parser.parse_args()
    flags = ["--device", "cpu", "--max-num-seqs", "256", "--model", args.model]
    for name in ("threads", "quantization", "kv_dtype"):
        flags += [f"--{name.replace('_', '-')}", getattr(args, name)]
    runner = ModelRunner(load_settings(WorkerSettings, flags))
    blocks = max(seqs * -(-CONTEXT // runner.info.block_size) for seqs, _ in STEPS)
    runner.configure(1, blocks + 1024)
    seconds = {}
    for decodes, prompt in STEPS:
        parts = [f"{decodes} decodes"] * (decodes > 0) + [f"{prompt} tokens"] * (prompt > 0)
        name = " and ".join(parts)
        seconds[name] = measure(runner, decodes, prompt)
        print(f"{name:<32}{1e3 * seconds[name]:10.2f} ms", flush=True)
    if args.out:
        result = {**dataclasses.asdict(this_machine()), "flags": flags, "seconds": seconds}
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
