"""Quantized weights in the layouts that a GPU multiplies fastest, see `kernels.ops.PackedWeight`.

| format | class | x, if it has few rows | x, if it has many rows |
|---|---|---|---|
| int8, one scale per row, no zeros | `Int8Weight` | int8 x | int8 x |
| fp8, Hopper | `Fp8Weight` | x as it is | fp8 x, if there is a scale per row or per 128 columns |
| others | `CodeWeight` | x as it is | x as it is |
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import ScalingType, scaled_mm
from triton.runtime.driver import driver

from worker_svc.errors import ModelError
from worker_svc.kernels.ops import Exchange, PlainWeight
from worker_svc.kernels.triton import batch_invariance
from worker_svc.kernels.triton.launch import INTERPRETED
from worker_svc.kernels.triton.quantized.code_matmul import code_matmul, pack_int4
from worker_svc.kernels.triton.quantized.int8_matmul import int8_matmul
from worker_svc.kernels.triton.quantized.products import SPLIT_ROWS, Grouped
from worker_svc.kernels.triton.quantized.row_quantization import quantize
from worker_svc.weights.quantization.formats import QuantizedWeight

MAX_WIDTH, MIN_WIDTH = 64, 16  # bytes of a tile's rows
SCALING_BLOCK = 128  # columns that share a scale, for products of two fp8 matrices
MULTIPLE = 16  # both sizes of a weight in such a product are multiples
ROWS_MULTIPLE = 4  # so are the rows of x, if there is a scale per block
BLOCK_SCALING_CUDA = (12, 9)  # the first version whose cuBLAS has scales per block


def pack_quantized(weight: QuantizedWeight, dtype: torch.dtype) -> Int8Weight | CodeWeight:
    """Packs `weight` for steps that compute in dtype.

    Raises:
        ModelError: the weight's groups do not fit the kernels.
    """
    groups = weight.scales.shape[1]
    if weight.format == "int8" and groups == 1 and weight.zeros is None:
        return Int8Weight(weight.codes.contiguous(), weight.scales[:, 0].contiguous(), dtype)
    width = _width(weight.group_size, groups, weight.format)
    scales = _narrowed(weight.scales).T.contiguous()
    if weight.format == "fp8":
        codes = weight.codes.contiguous()
        if _scales_products(codes.shape, groups):
            return Fp8Weight(codes, weight.scales.T.contiguous(), None, dtype)
        return CodeWeight(codes, scales, None, dtype)
    codes = weight.codes.contiguous()
    if weight.format == "int4":
        nibbles = torch.stack((codes & 15, codes >> 4), dim=2).flatten(1)
        codes = pack_int4(nibbles, width)
    zeros = None if weight.zeros is None else weight.zeros.T.contiguous()
    return CodeWeight(codes, scales, zeros, dtype, weight.shape[1])


def stack(weights: Sequence[Int8Weight | CodeWeight]) -> Int8Weight | CodeWeight:
    """Makes one weight of equal matrices, for `Grouped` products."""
    if len({type(each) for each in weights}) > 1:  # some have zeros, some have none
        weights = [
            CodeWeight(each.codes, each.scales[None], None, each.dtype)
            if isinstance(each, Int8Weight)
            else each
            for each in weights
        ]
    states = [each.state() for each in weights]
    first = states[0]
    if zeros := [each["zeros"] for each in states if "zeros" in each]:
        default = torch.full_like(zeros[0], 8 if first["codes"].dtype == torch.uint8 else 0)
        states = [{"zeros": default, **each} for each in states]
    if len({each["scales"].dtype for each in states}) > 1:
        states = [{**each, "scales": each["scales"].float()} for each in states]
    joined = {name: torch.stack([each[name] for each in states]) for name in states[0]}
    return unpack_quantized({**joined, "like": first["like"]})


def unpack_quantized(state: dict[str, torch.Tensor]) -> Int8Weight | CodeWeight:
    """Makes a weight from its `state`."""
    columns, dtype = state["like"].shape[1], state["like"].dtype
    if "int8" in state:
        return Int8Weight(state["int8"], state["scales"], dtype)
    codes, scales, zeros = state["codes"], state["scales"], state.get("zeros")
    is_fp8_matrix = codes.dtype == torch.float8_e4m3fn and codes.dim() == 2
    if is_fp8_matrix and _scales_products(codes.shape, len(scales)):
        return Fp8Weight(codes, scales.float(), zeros, dtype, columns)
    return CodeWeight(codes, scales, zeros, dtype, columns)


class Int8Weight:
    """W as int8 codes [out, in] with a scale per row, multiplied by x quantized row by row."""

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> None:
        self.codes = codes
        self.scales = scales
        self.dtype = dtype

    def matmul(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        exchange: Exchange | None = None,
        grouped: Grouped | None = None,
    ) -> torch.Tensor:
        codes, scales = quantize(x, torch.int8, maxima=_maxima(x, exchange))
        return int8_matmul(codes, scales, self.codes, self.scales, bias, x.dtype, grouped)

    def state(self) -> dict[str, torch.Tensor]:
        like = _like(self, self.codes.shape[-1])
        return {"int8": self.codes, "scales": self.scales, "like": like}


class CodeWeight:
    """W as codes that become numbers while they are multiplied by x, which is not quantized.
    `code_matmul` describes the layouts of `codes`, `scales` and `zeros`."""

    def __init__(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        dtype: torch.dtype,
        columns: int | None = None,
    ) -> None:
        self.codes = codes
        self.scales = scales
        self.zeros = zeros
        self.dtype = dtype
        self._columns = codes.shape[-1] if columns is None else columns
        groups = scales.shape[-2]
        self._group = self._columns // groups
        is_int4 = codes.dtype == torch.uint8
        self._width = codes.shape[-1] if is_int4 else _width(self._group, groups)
        self._bytes = codes.view(torch.uint8) if codes.dtype == torch.float8_e4m3fn else codes

    def matmul(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        exchange: Exchange | None = None,
        grouped: Grouped | None = None,
    ) -> torch.Tensor:
        sizes = self._group, self._width
        return code_matmul(x, self._bytes, self.scales, self.zeros, bias, *sizes, grouped)

    def state(self) -> dict[str, torch.Tensor]:
        state = {"codes": self.codes, "scales": self.scales, "like": _like(self, self._columns)}
        if self.zeros is not None:
            state["zeros"] = self.zeros
        return state


def plain_codes(weight: torch.Tensor, dtype: torch.dtype) -> CodeWeight:
    """Makes a weight whose codes are the numbers of `weight` [out, in]."""
    scales = torch.ones(1, len(weight), dtype=torch.float16, device=weight.device)
    return CodeWeight(weight, scales, None, dtype)


class InvariantWeight(PlainWeight):
    """W in its own layout, multiplied by the kernel of `CodeWeight`, for which its numbers are
    codes. So a row's bits do not depend on other rows (`batch_invariance`)."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__(weight)
        self._codes = plain_codes(weight, weight.dtype)

    def matmul(
        self, x: torch.Tensor, bias: torch.Tensor | None, exchange: Exchange | None = None
    ) -> torch.Tensor:
        return self._codes.matmul(x, bias)

    def matmul_into(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(self.matmul(x, None))


class Fp8Weight(CodeWeight):
    """W as fp8 codes, which torch multiplies by x in fp8 if x has many rows. With few rows, reading
    the weight takes most of the time, and x is not quantized."""

    def matmul(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        exchange: Exchange | None = None,
        grouped: Grouped | None = None,
    ) -> torch.Tensor:
        assert grouped is None  # `stack` makes no weight of this kind
        if len(x) <= SPLIT_ROWS or x.dtype != torch.bfloat16 or batch_invariance.is_on():
            return super().matmul(x, bias, exchange)
        one_group = len(self.scales) == 1
        codes, scales = quantize(
            x,
            torch.float8_e4m3fn,
            group=None if one_group else SCALING_BLOCK,
            maxima=_maxima(x, exchange) if one_group else None,
            multiple=1 if one_group else ROWS_MULTIPLE,
        )
        if one_group:  # [T, 1] and [1, out]
            scaling, scales, weight_scales = ScalingType.RowWise, scales[:, 0, None], self.scales
        else:  # [T, groups] and [out, groups], column-major
            scaling, weight_scales = ScalingType.BlockWise1x128, self.scales.T
        out: torch.Tensor = scaled_mm(
            codes, self.codes.T, scales, scaling, weight_scales, scaling, output_dtype=x.dtype
        )
        out = out[: len(x)]
        return out if bias is None else out + bias


def _maxima(x: torch.Tensor, exchange: Exchange | None) -> torch.Tensor | None:
    """Magnitudes [T] by which to quantize x, if other ranks hold further columns of x."""
    if exchange is None:
        return None
    return exchange.maximum(torch.linalg.vector_norm(x, torch.inf, dim=1, dtype=torch.float32))


def _width(group: int, groups: int, name: str = "") -> int:
    """Bytes of a tile's rows: a power of two, which divides the group if there are several."""
    width = MAX_WIDTH if groups == 1 else min(MAX_WIDTH, group & -group)
    if width < MIN_WIDTH:
        raise ModelError(
            f"quantization: {name} in groups of {group} is not served on cuda; groups have to be "
            f"multiples of {MIN_WIDTH}"
        )
    return width


def _narrowed(scales: torch.Tensor) -> torch.Tensor:
    """The scales in 16 bits if that loses nothing, which holds for most checkpoints."""
    for dtype in (torch.float16, torch.bfloat16):
        narrow = scales.to(dtype)
        if torch.equal(narrow.float(), scales):
            return narrow
    return scales


def _scales_products(shape: torch.Size, groups: int) -> bool:
    """Whether torch can multiply an fp8 matrix of this shape by another one on this GPU."""
    if INTERPRETED or driver.active.get_current_target().arch != 90:
        return False
    if any(size % MULTIPLE for size in shape):
        return False
    if groups == 1:
        return True
    version = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
    return groups * SCALING_BLOCK == shape[1] and version >= BLOCK_SCALING_CUDA


def _like(weight: Int8Weight | CodeWeight, columns: int) -> torch.Tensor:
    """An empty tensor [0, columns] in the dtype of the weight's numbers."""
    return torch.empty(0, columns, dtype=weight.dtype)
