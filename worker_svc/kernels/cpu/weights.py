"""Weights in the panels that the native library multiplies."""

from __future__ import annotations

from collections.abc import Iterable
from ctypes import addressof, byref
from math import gcd
from typing import Any

import torch
import torch.nn.functional as F

from worker_svc.errors import ModelError
from worker_svc.kernels import cpu_features
from worker_svc.kernels.cpu.library import library
from worker_svc.kernels.cpu.program import run, tracing
from worker_svc.kernels.cpu.structs import (
    LANES,
    Kind,
    Op,
    PackArgs,
    Packed,
    Phase,
    ProductArgs,
    Step,
    Weight,
)
from worker_svc.kernels.ops import Exchange
from worker_svc.kv_cache import NewTensor
from worker_svc.weights.quantization.formats import QuantizedWeight

PANEL = 2 * LANES
# The inputs of a row that share a scale once they are rounded to 8 bits. With a scale per row, as
# most servers have it, SmolLM2's perplexity grew by 3.7% (docs/results/quality.md).
SEGMENT = 64
_INPUTS = {Kind.INT8: 4, Kind.INT4: 8, Kind.INT6: 16}  # of a step
_ZEROS = {Kind.INT8: 128, Kind.INT4: 8}  # without zeros of a group
KINDS = {
    torch.float32: Kind.FLOAT32,
    torch.uint32: Kind.BFLOAT16,
    torch.uint16: Kind.BF16_PAIRS,
    torch.int8: Kind.INT8,
    torch.int32: Kind.INT4,
    torch.uint8: Kind.INT6,
}


class PanelWeight:
    """W [out, in] in panels, as `native/products.h` describes them.

    Args:
        state: the codes, scales and zeros of `native/products.h`, and the shape int64 [2], or [3]
            of several matrices: [out, in, matrices].
    """

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        self._state = state
        self._codes, self._scales, self._zeros = (
            self._state[name] for name in ("codes", "scales", "zeros")
        )
        self.out_features, self.in_features = state["shape"][:2].tolist()
        self.groups = self._scales.shape[1] if len(self._scales) else 1
        self.kind = KINDS[self._codes.dtype]
        self.quantizes = self.kind in _INPUTS
        self.segment = (
            SEGMENT if self.groups == 1 else gcd(SEGMENT, self.in_features // self.groups)
        )
        self._structs: dict[tuple[int, int], tuple[Any, torch.Tensor | None]] = {}
        self.stride = int(library().nano_stride(byref(self.struct(None, self.segment))))

    def struct(self, bias: torch.Tensor | None, segment: int) -> Any:
        """The `Weight` for the library. It lives as long as this object."""
        key = 0 if bias is None else bias.data_ptr(), segment
        if key not in self._structs:
            bias = None if bias is None else bias.float()
            addresses = [
                each.data_ptr() if each is not None and each.numel() else None
                for each in (self._codes, self._scales, self._zeros, bias)
            ]
            sizes = self.in_features, self.out_features, self.groups, segment
            self._structs[key] = Weight(self.kind, *sizes, *addresses), bias
        return self._structs[key][0]

    def split(self, exchange: Exchange | None) -> tuple[int, Exchange | None]:
        """The inputs of a segment, and `exchange` if other ranks have a part of some segment."""
        if exchange is None or not self.quantizes or self.in_features % SEGMENT == 0:
            return self.segment, None
        segment = gcd(self.segment, self.in_features)
        if segment % _INPUTS[self.kind] == 0:
            return segment, exchange
        # Segments would cut steps of the loop, so all inputs of a row share a magnitude.
        return self.in_features, exchange

    def matmul(
        self, x: torch.Tensor, bias: torch.Tensor | None, exchange: Exchange | None = None
    ) -> torch.Tensor:
        if trace := tracing():
            return trace.product(self, x, bias, exchange)
        assert exchange is None  # in layers only, which are traced
        x = x.float().contiguous()
        rows, segments = len(x), -(-self.in_features // self.segment)
        step = Step(tokens=rows)
        count = addressof(step)  # its first field
        out = torch.empty(rows, self.out_features)
        words = torch.empty(rows, self.stride, dtype=torch.int32)
        sums = torch.empty(rows, segments, dtype=torch.int32)
        scales = torch.empty(rows, segments)
        packed = Packed(words.data_ptr(), sums.data_ptr(), scales.data_ptr(), self.stride)
        weight = addressof(self.struct(bias, self.segment))
        pack = PackArgs(weight, count, x.data_ptr(), None, packed)
        product = ProductArgs(weight, count, packed, out.data_ptr())
        ops = (Op * 2)(Op(Phase.PACK, addressof(pack)), Op(Phase.PRODUCT, addressof(product)))
        run(ops, step)
        return out

    def shared_segment(self, exchange: Exchange, segment: int) -> int:
        """The inputs of all ranks that share a magnitude."""
        return exchange.columns if segment == self.in_features else self.segment

    def state(self) -> dict[str, torch.Tensor]:
        return self._state


def pack_floats(weight: torch.Tensor, scales: torch.Tensor | None = None) -> PanelWeight:
    """Packs weight [out, in] float32 or bfloat16, with scales [out, groups] if there are any."""
    if weight.dtype == torch.float32:
        codes = _in_panels(weight, 1).squeeze(3)
    elif cpu_features.has("avx512bf16"):
        codes = _in_panels(weight.view(torch.int16), 2).view(torch.uint16)
    else:
        # [panels, in, PANEL] -> [panels, in, LANES, 2]
        columns = _in_panels(weight.view(torch.int16), 1).unflatten(2, (2, LANES)).squeeze(4)
        codes = columns.transpose(2, 3).contiguous().view(torch.uint32).squeeze(3)
    nothing = torch.empty(0, 0, 0)
    of_columns = nothing if scales is None else _columns(scales)
    return _weight(codes, of_columns, nothing.int(), *weight.shape)


def pack_quantized(weight: QuantizedWeight) -> PanelWeight:
    """Packs a quantized weight.

    Raises:
        ModelError: the group size is not a multiple of the inputs that a step of the loop takes.
    """
    out_features, in_features = weight.shape
    scales = weight.scales
    if weight.format == "fp8":
        return pack_floats(weight.codes.to(torch.bfloat16), scales)  # which holds every code
    depth = _INPUTS[Kind[weight.format.upper()]]
    if scales.shape[1] > 1 and weight.group_size % depth:
        raise ModelError(
            f"group_size: {weight.group_size} is not a multiple of {depth}, as {weight.format} "
            "weights on a CPU need"
        )
    if weight.format == "int8":
        codes = weight.codes.view(torch.uint8) ^ 128
        codes = _in_panels(codes, depth, fill=128).view(torch.int8)
    elif weight.format == "int6":
        codes = weight.codes.view(torch.uint8) + 32
        words = _in_panels(codes, depth, fill=32).unflatten(3, (4, 4))
        high, low = words >> 4, words & 15
        codes = words.new_empty(*words.shape[:2], 3, PANEL, 4)
        codes[:, :, 0] = (low[..., 1, :] << 4).add_(low[..., 0, :])
        codes[:, :, 1] = (low[..., 3, :] << 4).add_(low[..., 2, :])
        codes[:, :, 2] = high[..., 0, :]
        for word in range(1, 4):
            codes[:, :, 2].add_(high[..., word, :] << 2 * word)
    else:
        codes = weight.codes.contiguous()
        if padding := -codes.shape[1] % 4:
            codes = F.pad(codes, (0, padding))
        codes = _in_panels(_interleave(codes.view(torch.int32)), 1).squeeze(3)
    zeros = torch.empty(0, 0, 0, dtype=torch.int32)
    if weight.zeros is not None:
        zeros = _columns(weight.zeros.int() + (128 if weight.format == "int8" else 0))
    return _weight(codes, _columns(scales), zeros, out_features, in_features)


def _interleave(words: torch.Tensor) -> torch.Tensor:
    """Halves of bytes 0 to 7 of each word -> 0, 4, 1, 5, 2, 6, 3, 7."""
    for shift, mask in ((8, 0xFF00), (4, 0xF000F0)):
        swapped = (words ^ words >> shift).bitwise_and_(mask)
        words = words ^ swapped.bitwise_xor_(swapped << shift)
    return words


def stack(weights: Iterable[PanelWeight], count: int, new: NewTensor) -> PanelWeight:
    """Makes one weight of `count` equal matrices, whose panels follow each other."""
    joined: dict[str, torch.Tensor] = {}
    for number, weight in enumerate(weights):
        for name in ("codes", "scales", "zeros"):
            part = weight.state()[name]
            if not len(part):
                continue
            if name not in joined:
                joined[name] = new([count * len(part), *part.shape[1:]], part.dtype)
                if name == "zeros":  # of the matrices that have none
                    joined[name].fill_(_ZEROS[weight.kind])
            joined[name][number * len(part) : (number + 1) * len(part)] = part
    shape = torch.tensor([weight.out_features, weight.in_features, count])
    return PanelWeight({**weight.state(), **joined, "shape": shape})


def _weight(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    out_features: int,
    in_features: int,
) -> PanelWeight:
    shape = torch.tensor([out_features, in_features])
    return PanelWeight({"codes": codes, "scales": scales, "zeros": zeros, "shape": shape})


def _in_panels(matrix: torch.Tensor, depth: int, fill: int = 0) -> torch.Tensor:
    """[out, in] -> [panels, in / depth, PANEL, depth], padded."""
    out_features, in_features = matrix.shape
    padding = (0, -in_features % depth, 0, -out_features % PANEL)
    if any(padding):
        matrix = F.pad(matrix, padding, value=fill)
    dtype, panels = matrix.dtype, matrix.shape[0] // PANEL
    word = {4: torch.int32, 8: torch.int64}.get(matrix.itemsize * depth)
    if word and matrix.is_contiguous():  # moving whole words takes half the time
        matrix, depth = matrix.view(word), 1
    inputs = matrix.shape[1] // depth
    moved = matrix.view(panels, PANEL, inputs, depth).transpose(1, 2).contiguous()
    return moved.view(dtype).view(panels, inputs, PANEL, -1)


def _columns(groups: torch.Tensor) -> torch.Tensor:
    """[out, groups] -> [panels, groups, PANEL]"""
    return _in_panels(groups, 1).squeeze(3)
