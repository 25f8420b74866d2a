"""`python -m tests.worker_svc.kernels.triton.launch_cost` times the Python of a launch, Triton's
own and `worker_svc.kernels.triton.launch`'s in turn, in microseconds, with a driver that does
nothing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from tests.worker_svc.kernels.triton.compiled import idle_driver
from worker_svc.kernels.triton import launch
from worker_svc.kernels.triton.decode_attention import decode_attention, decode_workspace
from worker_svc.kernels.triton.prompt_attention import prompt_attention
from worker_svc.kernels.triton.rms_norm import add_rms_norm
from worker_svc.kernels.triton.rope_store import rope_store
from worker_svc.kernels.triton.silu_mul import silu_and_multiply

ROUNDS, CALLS = 15, 200
ROWS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 64, 16, 8, 128, 1024
IN_A_LAYER = {"add_rms_norm": 2}  # others once


def launchers() -> dict[str, Callable[[], object]]:
    """The launches of a layer of Qwen3-0.6B, in a step of prompts and decodes."""

    def half(*size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.bfloat16)

    def ints(*size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32)

    x, weight, norm = half(ROWS, HIDDEN), half(HIDDEN), half(HEAD_DIM)
    qkv = half(ROWS, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    q, cache = half(ROWS, HEADS, HEAD_DIM), half(2, 4, 64, KV_HEADS, HEAD_DIM)
    rows, ends = ints(ROWS), ints(ROWS + 1)
    cos_sin = torch.zeros(4096, 2, HEAD_DIM // 2)
    workspace = decode_workspace(ROWS, HEADS, HEAD_DIM, 1, q.device)
    sequences = ends, rows, rows, ends, 0.1
    store = (norm, norm, 1e-6, cos_sin, rows, rows, cache)
    return {
        "add_rms_norm": partial(add_rms_norm, x, x, weight, 1e-6),
        "rope_store": partial(rope_store, qkv, HEADS, *store),
        "decode_attention": partial(decode_attention, q, cache, rows, *sequences, 1, workspace, q),
        "prompt_attention": partial(prompt_attention, q, cache, ints(4, 2), *sequences, q),
        "silu_and_multiply": partial(silu_and_multiply, half(ROWS, 6 * HIDDEN)),
    }


def microseconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - started) / CALLS * 1e6


def main() -> None:
    layer = {True: 0.0, False: 0.0}
    with idle_driver(90):
        print(f"{'':<20}{'triton':>8}{'launch':>8}")
        for name, call in launchers().items():
            found: dict[bool, list[float]] = {True: [], False: []}
            for _ in range(ROUNDS):
                for direct in found:
                    launch.DIRECT = direct
                    call()
                    found[direct].append(microseconds(call))
            median = {direct: statistics.median(each) for direct, each in found.items()}
            print(f"{name:<20}{median[False]:8.1f}{median[True]:8.1f}")
            for direct in layer:
                layer[direct] += median[direct] * IN_A_LAYER.get(name, 1)
    print(f"{'layer':<20}{layer[False]:8.1f}{layer[True]:8.1f}")


if __name__ == "__main__":
    main()
