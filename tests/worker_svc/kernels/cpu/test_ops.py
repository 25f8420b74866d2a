from __future__ import annotations

import pytest
import torch

from worker_svc.kernels.cpu.ops import embed
from worker_svc.kernels.ops import PlainWeight
from worker_svc.kernels.triton.embedding import embed_reference

pytestmark = pytest.mark.launches_nothing


@pytest.mark.parametrize(("start", "count"), [(0, 50), (20, 13), (40, 10), (0, 0)])
def test_embed(start: int, count: int) -> None:
    """Ids are all known or sampled by the previous step, here or on another rank."""
    weight = PlainWeight(torch.randn(64, 5, generator=torch.Generator().manual_seed(0)))
    last_tokens = torch.tensor([7, 45, 21], dtype=torch.int32)
    for ids in ([20, 32, 33, 49], [-1, -2, -3, 3], [25, -3]):
        input_ids = torch.tensor(ids, dtype=torch.int32)
        arguments = (input_ids, last_tokens, weight, start, count)
        assert torch.equal(embed(*arguments), embed_reference(*arguments))
        assert input_ids.tolist() == ids
