from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import product

import pytest
import torch

from tests.worker_svc.kernels.cpu.eager_ops import alone, embed
from tests.worker_svc.kernels.triton.weights import random_weight
from worker_svc.errors import ModelError
from worker_svc.kernels import cpu_features
from worker_svc.kernels.cpu.ops import OneDnnWeight, pack, unpack
from worker_svc.kernels.cpu.weights import SEGMENT, PanelWeight, pack_floats, pack_quantized
from worker_svc.kernels.ops import Exchange, PackedWeight, PlainWeight
from worker_svc.weights.quantization.formats import Format, QuantizedWeight, quantize_rows

TOKENS = (1, 2, 3, 5, 7, 12, 13, 263)  # every size of tile, alone, in rows and in blocks of them
SHAPES = [(1, 8), (33, 8), (64, 96), (70, 256), (150, 520)]
# Format, groups, and whether zeros are given; groups of whole steps only.
QUANTIZED = [
    (fmt, groups, zeros)
    for fmt, groups, zeros in product(("int8", "int6", "int4", "fp8"), (1, 4), (False, True))
    if fmt in ("int8", "int4") or not zeros
]
# CPUs that lack newer instructions, and what of /proc/cpuinfo they have.
_AVX2 = "avx2,fma,f16c"
CPUS = {
    "avx512": f"{_AVX2},avx512f,avx512bw,avx512vl,avx512dq",
    "avx2": _AVX2,
    "generic": "sse2",
}


def rounded(x: torch.Tensor, segment: int) -> torch.Tensor:
    """x [T, in] as products with integers see it: in 8 bits, each `segment` of the inputs with a
    scale of its own. The result is float64."""
    rows, columns = x.shape
    segments = torch.nn.functional.pad(x, (0, -columns % segment)).view(-1, segment)
    codes, scales = quantize_rows(segments)
    return (codes.double() * scales.double()[:, None]).view(rows, -1)[:, :columns]


def check_quantized() -> None:
    """Products are those of exact integers, alone and in a crowd, and rows what they should be."""
    for (out_features, in_features), (fmt, groups, zeros) in product(SHAPES, QUANTIZED):
        if (groups > 1 or fmt == "int6") and in_features % (groups * (16 if fmt == "int6" else 8)):
            continue
        weight = random_weight(fmt, out_features, in_features, groups=groups, zeros=zeros)
        if fmt != "fp8":  # the largest sums that there may be
            weight.codes[0], weight.codes[-1] = weight.codes.max(), weight.codes.min()
        packed = unpack(pack(weight, torch.bfloat16).state())
        assert isinstance(packed, PanelWeight)
        generator = torch.Generator().manual_seed(0)
        bias = torch.randn(out_features, generator=generator)
        dequantized = weight.dequantized()
        for tokens in TOKENS:
            x = torch.randn(tokens, in_features, generator=generator)
            x[0] = 0  # has no scale
            x[1:2] = 1
            seen = x.double()
            if fmt != "fp8":
                seen = rounded(x, packed.segment)
            elif cpu_features.has("avx512bf16"):
                seen = x.bfloat16().double()
            expected = seen @ dequantized.double().T + bias
            y = packed.matmul(x, bias)
            error = (y - expected).abs().max() / expected.abs().max()
            assert error < 3e-6, (fmt, groups, zeros, tokens, error)
            for row in range(0, tokens, 5):
                assert torch.equal(packed.matmul(x[row : row + 1], bias)[0], y[row])
        if fmt != "fp8":
            rows = torch.randint(out_features, (5,), generator=generator).int()
            looked_up = embed(rows, rows[:0], packed, 0, out_features)
            assert torch.equal(looked_up, dequantized[rows])


KINDS: list[tuple[Callable[[torch.Tensor], PackedWeight], torch.dtype]] = [
    (PlainWeight, torch.float32),
    (OneDnnWeight, torch.float32),
    (OneDnnWeight, torch.bfloat16),
    (pack_floats, torch.float32),
    (pack_floats, torch.bfloat16),
]


def check_floats(kind: Callable[[torch.Tensor], PackedWeight], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for out_features, in_features in [(1, 1), (33, 7), (64, 100), (150, 513)]:
        weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
        bias = torch.randn(out_features, generator=generator)
        packed = kind(weight.clone())
        for tokens in TOKENS:
            x = torch.randn(tokens, in_features, generator=generator)
            product = x.double() @ weight.double().T
            for given in (None, bias):
                y = packed.matmul(x, None if given is None else given.to(dtype))
                expected = product if given is None else product + given.to(dtype).double()
                assert y.dtype == torch.float32
                scale = expected.abs().max().item() + in_features**0.5
                bound = scale * (2**-7 if dtype == torch.bfloat16 else 2**-19)
                assert (y.double() - expected).abs().max() < bound
            if kind is pack_floats:
                alone = [packed.matmul(x[row : row + 1], None)[0] for row in range(tokens)]
                assert torch.equal(packed.matmul(x, None), torch.stack(alone))


def test_quantized() -> None:
    check_quantized()


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_floats(kind: Callable[[torch.Tensor], PackedWeight], dtype: torch.dtype) -> None:
    bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if kind is OneDnnWeight and not (torch._C._has_mkldnn and (dtype == torch.float32 or bfloat16)):
        pytest.skip("oneDNN does not multiply this on this CPU")
    check_floats(kind, dtype)


def test_codes_of_bfloat16_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_features, "has", lambda feature: False)
    check_floats(lambda weight: pack(weight, weight.dtype), torch.bfloat16)


def run_as(cpu: str, command: str) -> None:
    """Runs Python code in a process that does without some instructions of this CPU."""
    needed = set(CPUS[cpu].split(","))
    if not all(map(cpu_features.has, needed)):
        pytest.skip(f"this CPU is older than {cpu}")
    pretence = {"NANO_CPU_FEATURES": CPUS[cpu]}
    subprocess.run([sys.executable, "-c", command], check=True, env=os.environ | pretence)


FROM_HERE = "from tests.worker_svc.kernels.cpu.test_weights import *; "


@pytest.mark.parametrize(
    "cpu", [pytest.param(each, marks=[] if each == "avx2" else pytest.mark.soak) for each in CPUS]
)
def test_older_cpus(cpu: str) -> None:
    """Products as compiled for CPUs that lack some instructions."""
    checks = "check_quantized(); check_floats(pack_floats, torch.bfloat16)"
    run_as(cpu, FROM_HERE + checks)


def test_groups_of_parts_of_steps_are_rejected() -> None:
    weight = random_weight("int4", 32, 48, groups=4)
    with pytest.raises(ModelError, match="group_size: 12 is not a multiple of 8"):
        pack_quantized(weight)


@pytest.mark.parametrize("share", [32, 96, 128, 180])
@pytest.mark.parametrize("fmt", ["int8", "int4"])
def test_ranks_share_magnitudes(share: int, fmt: Format) -> None:
    """Two halves of the columns, quantized by what both exchange, add up to the whole."""
    weight = random_weight(fmt, 40, 2 * share)
    x = torch.randn(9, 2 * share, generator=torch.Generator().manual_seed(1))
    if (fmt, share) == ("int4", 180):  # segments would cut steps of 8 inputs
        maxima = x.abs().amax(dim=1, keepdim=True)
    else:
        padding = 0, -2 * share % SEGMENT
        maxima = torch.nn.functional.pad(x, padding).view(9, -1, SEGMENT).abs().amax(dim=2)

    def maximum(mine: torch.Tensor) -> torch.Tensor:
        assert (mine <= maxima).all()
        return maxima

    parts = []
    for first in (0, share):
        codes = weight.codes[:, first * weight.codes.shape[1] // (2 * share) :]
        codes = codes[:, : weight.codes.shape[1] // 2].contiguous()
        half = pack_quantized(QuantizedWeight(fmt, codes, weight.scales))
        exchange = Exchange(first, 2 * share, maximum)
        mine = x[:, first : first + share].contiguous()
        parts.append(alone(half.matmul, mine, None, exchange))
    whole = pack_quantized(weight).matmul(x, None)
    if (fmt, share) == ("int4", 180):
        codes, scales = quantize_rows(x)
        seen = codes.double() * scales.double()[:, None]
        whole = (seen @ weight.dequantized().double().T).float()
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=1e-5, atol=1e-3)
