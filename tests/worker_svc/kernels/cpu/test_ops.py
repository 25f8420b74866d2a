from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from worker_svc.kernels.cpu.ops import OneDnnWeight, PanelWeight, embed
from worker_svc.kernels.ops import PackedWeight, PlainWeight
from worker_svc.kernels.triton.embedding import embed_reference

pytestmark = pytest.mark.launches_nothing

KINDS: list[tuple[Callable[[torch.Tensor], PackedWeight], torch.dtype]] = [
    (PlainWeight, torch.float32),
    (PlainWeight, torch.bfloat16),
    (OneDnnWeight, torch.float32),
    (OneDnnWeight, torch.bfloat16),
    (PanelWeight, torch.bfloat16),
]


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 1), (33, 7), (64, 100), (150, 513)])
def test_all_kinds_multiply_alike(
    kind: Callable[[torch.Tensor], PackedWeight],
    dtype: torch.dtype,
    out_features: int,
    in_features: int,
) -> None:
    if kind is OneDnnWeight and not torch._C._has_mkldnn:
        pytest.skip("no oneDNN in this torch")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
    bias = torch.randn(out_features, generator=generator).to(dtype)
    packed = kind(weight.clone())
    for tokens in (1, 2, 3, 7, 12, 13, 131):
        x = torch.randn(tokens, in_features, generator=generator).to(dtype)
        product = x.double() @ weight.double().T
        for actual, expected in (
            (packed.matmul(x, None), product),
            (packed.matmul(x, bias), product + bias.double()),
        ):
            assert actual.dtype == dtype
            scale = expected.abs().max().item() + in_features**0.5
            bound = scale * (2**-7 if dtype == torch.bfloat16 else 2**-19)
            assert (actual.double() - expected).abs().max() < bound


def test_panel_rows_do_not_depend_on_each_other() -> None:
    """Bit for bit: a sequence's results may not change with the batch it is in."""
    generator = torch.Generator().manual_seed(0)
    packed = PanelWeight(torch.randn(70, 90, generator=generator).bfloat16())
    x = torch.randn(29, 90, generator=generator).bfloat16()
    together = packed.matmul(x, None)
    for start in range(29):
        alone = packed.matmul(x[start : start + 1], None)
        assert torch.equal(together[start : start + 1], alone)


@pytest.mark.parametrize(("start", "count"), [(0, 50), (20, 13), (40, 10), (0, 0)])
def test_embed(start: int, count: int) -> None:
    """Ids are all known or sampled by the previous step, here or on another rank."""
    weight = PlainWeight(torch.randn(64, 5, generator=torch.Generator().manual_seed(0)))
    last_tokens = torch.tensor([7, 45, 21], dtype=torch.int32)
    for ids in ([20, 32, 33, 49], [-1, -2, -3, 3], [25, -3]):
        input_ids = torch.tensor(ids, dtype=torch.int32)
        arguments = (input_ids, last_tokens, PlainWeight(weight), start, count)
        assert torch.equal(embed(*arguments), embed_reference(*arguments))
        assert input_ids.tolist() == ids
