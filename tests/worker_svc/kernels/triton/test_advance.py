from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch

from shared.graph_sizes import GraphSize
from shared.paging import Paging
from tests.worker_svc.device import DEVICE, ON_GPU, by_device
from tests.worker_svc.harness import Batch, limits
from worker_svc.kernels.triton import advance as module
from worker_svc.step.arrays import StepArrays
from worker_svc.step.decode import decode_run
from worker_svc.step.padding import padded
from worker_svc.step.tensors import StepTensors, upload_step


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        monkeypatch.setattr(module, "ROWS", 4)


def make_run(rows: int, block_size: int, num_tables: int) -> list[StepArrays]:
    rng = np.random.default_rng(rows)
    paging = Paging(block_size)
    if num_tables > 1:
        paging = Paging(2 * block_size, window=block_size, window_block_size=block_size)
    batch = Batch(limits(num_blocks=4096, paging=paging, max_num_seqs=rows))
    batch.contexts = dict(enumerate(rng.integers(1, 3 * block_size, rows).tolist()))
    request = batch.request(
        [(seq, [int(token)]) for seq, token in enumerate(rng.integers(0, 301, rows))],
        temperatures=rng.random(rows).tolist(),
        seeds=[2**64 - 1, *rng.integers(0, 2**64, rows - 1, np.uint64).tolist()],
        room=6,
    )
    request.num_steps = 6
    return decode_run(request, batch.limits, None)


def columns(step: StepArrays, rows: int) -> StepTensors:
    """The columns of a graph of `rows` decodes, on the device."""
    wide = padded(step, GraphSize(rows, 0, 0))
    return upload_step(wide, wide.query_lens[:0], DEVICE)


@pytest.mark.parametrize("num_tables", [1, 2])
@pytest.mark.parametrize("block_size", [1, 16, 100])
@pytest.mark.parametrize("rows", by_device(cpu=[1, 4, 9], gpu=[1, 128, 300]))
def test_columns_become_those_of_the_next_step(block_size: int, rows: int, num_tables: int) -> None:
    """All of them, bit for bit; rows of padding stay as they are."""
    first, *others = make_run(rows, block_size, num_tables)
    found = columns(first, rows + 2)
    for step in others:
        module.advance(found, block_size)
        expected = columns(step, rows + 2)
        for name in (each.name for each in fields(StepTensors)):
            actual = getattr(found, name)[: rows if name in ADVANCED else None]
            assert torch.equal(actual, getattr(expected, name)[: len(actual)]), name
    padding = columns(first, rows + 2)
    for name in ADVANCED:
        assert torch.equal(getattr(found, name)[rows:], getattr(padding, name)[rows:])


# In these, the padding's entries stay.
ADVANCED = ("input_ids", "positions", "context_lens", "uniforms")
