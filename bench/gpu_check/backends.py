"""The attention backends that are found, through the interface that the model uses."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch

from bench.gpu_check.inputs import (
    Batch,
    attend,
    blocks_needed,
    random_batch,
    relative_error,
    rounding,
)
from bench.gpu_check.parts import PartPlan
from bench.gpu_check.records import Report
from bench.gpu_check.setup import BACKENDS, Setup
from worker_svc.attention.paged import PagedBackend
from worker_svc.kernels.kv_store import store_kv


def parts(setup: Setup) -> list[PartPlan[Setup]]:
    return [PartPlan(name, partial(check_backend, name=name)) for name in BACKENDS]


def check_backend(setup: Setup, report: Report, name: str) -> None:
    sizes = setup.sizes
    rng = np.random.default_rng(setup.part_seed(name))
    short, longest = sizes.longest // 8, sizes.longest
    rows = max(sizes.decode_batches) // 2 + 1
    decodes = [1] * rows, rng.integers(1, longest, size=rows).tolist()
    decodes[1][:2] = [1, longest]
    prompts = [1, 2, 65, short, 2 * short]
    cached = [0, *rng.integers(1, short, size=4).tolist()]
    chunks = prompts, [sum(pair) for pair in zip(prompts, cached, strict=True)]
    mixed = decodes[0][:9] + chunks[0], decodes[1][:9] + chunks[1]
    cases = {
        "decodes": (*decodes, 0),
        "padded decodes": (*decodes, rows + 3),
        "prompts": (prompts, prompts, 0),
        "chunks": (*chunks, 0),
        "chunks and decodes": (*mixed, 0),
    }
    for heads, dtype in product(sizes.heads, sizes.dtypes):
        if heads.head_dim % 8:
            continue
        backend = setup.backend(name, heads, dtype)
        for case, (queries, contexts, pad_to) in cases.items():
            generator = setup.generator(f"{name} {case}")
            batch = random_batch(
                generator, queries, contexts, heads, backend.block_size, dtype, pad_to=pad_to
            )
            dtype_name = str(dtype).removeprefix("torch.")
            _check_batch(setup, report, f"{case}, {heads}, {dtype_name}", backend, batch)


def _check_batch(
    setup: Setup, report: Report, case: str, backend: PagedBackend[Any], batch: Batch
) -> None:
    errors = {}
    # New memory may hold anything, NaN too, and caches are not cleared. If that is what fails, the
    # detail shows it.
    for fill in (torch.nan, 0.0):
        num_blocks = blocks_needed(batch.step.context_lens.tolist(), backend.block_size)
        cache = backend.allocate(num_blocks)[0].fill_(fill)
        store_kv(batch.k, batch.v, torch.from_numpy(batch.slots).to(setup.device), cache)
        longest = max(setup.sizes.longest, int(batch.step.context_lens.max()))
        out = attend(backend, batch, cache, longest)
        errors[fill] = relative_error(out, batch.reference(cache, backend.shape.scale))
    report.check(
        case,
        errors[torch.nan],
        2 * rounding(batch.q.dtype),
        f"{errors[0.0]:.1e} where unused slots hold 0",
    )
