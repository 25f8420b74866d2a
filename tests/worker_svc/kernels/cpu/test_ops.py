from __future__ import annotations

import pytest
import torch

from worker_svc.kernels.cpu.ops import embed
from worker_svc.kernels.ops import PlainWeight

pytestmark = pytest.mark.launches_nothing


@pytest.mark.parametrize(("start", "count"), [(0, 50), (20, 13), (40, 10), (0, 0)])
def test_embed(start: int, count: int) -> None:
    """Ids are all known or sampled by the previous step, here or on another rank."""
    weight = PlainWeight(torch.randn(64, 5, generator=torch.Generator().manual_seed(0)))
    last_tokens = torch.tensor([7, 45, 21], dtype=torch.int32)
    for ids in ([20, 32, 33, 49], [-1, -2, -3, 3], [25, -3]):
        input_ids = torch.tensor(ids, dtype=torch.int32)
        known = [each if each >= 0 else int(last_tokens[-1 - each]) for each in ids]
        expected = torch.stack(
            [
                weight.weight[each - start] if start <= each < start + count else torch.zeros(5)
                for each in known
            ]
        )
        assert torch.equal(embed(input_ids, last_tokens, weight, start, count), expected)
        assert input_ids.tolist() == ids
