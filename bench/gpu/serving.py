"""Settings for serving the reference workload, shared by the stack and the in-process run."""

from __future__ import annotations

from typing import Any

from bench.gpu.setup import Setup
from worker_svc.model_runner import RunnerInfo
from worker_svc.step.decode import StepLimits

MAX_WAITING = 4096
# The maximum share of the GPU's blocks to use; the workload may need fewer.
CACHE_SHARE = 0.6


def variables(setup: Setup, budget: int) -> dict[str, Any]:
    """The variables of `make up` for `budget` prompt tokens in a step, with or without decodes."""
    settings = setup.settings()
    return {
        "device": settings.device,
        "dtype": settings.dtype,
        "max_num_seqs": setup.sizes.workload.num_seqs,
        "max_num_batched_tokens": budget,
        "max_num_prefill_tokens": budget,
        "max_model_len": setup.sizes.max_model_len,
        "max_waiting": MAX_WAITING,
    }


def cache_blocks(setup: Setup, info: RunnerInfo) -> int:
    wanted = setup.sizes.cache_tokens // info.block_size
    return min(wanted, int(info.num_blocks * CACHE_SHARE))


def step_limits(vocab_size: int, serving: dict[str, Any]) -> StepLimits:
    """The limits of a worker that serves with the variables `serving`."""
    return StepLimits(
        vocab_size=vocab_size,
        num_blocks=serving["kv_blocks"],
        block_size=serving["block_size"],
        max_num_seqs=serving["max_num_seqs"],
        max_num_batched_tokens=serving["max_num_batched_tokens"],
        max_model_len=serving["max_model_len"],
    )
