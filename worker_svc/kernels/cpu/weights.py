"""Packs weights in the panels that `kernels.cpu.linear` reads."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from worker_svc.errors import ModelError
from worker_svc.kernels import cpu_features
from worker_svc.kernels.cpu.linear import linear
from worker_svc.kernels.cpu.panels import KINDS, PANEL
from worker_svc.kernels.cpu.simd import LANES
from worker_svc.kernels.ops import Exchange
from worker_svc.weights.quantization.formats import QuantizedWeight

_NO_FLOATS = np.empty(0, np.float32)
# An e4m3 code is read as a float16 that is smaller than its value by this factor.
_FP8_FACTOR = 2.0**8


class PanelWeight:
    """W [out, in] in panels of one of the kinds in `panels.KINDS`.

    Args:
        state: the codes, scales and zeros that `linear` takes, and the shape int64 [2].
    """

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        self._state = state
        if state["codes"].is_meta:
            return  # a weight without numbers has only a state
        self._out_features, self._in_features = state["shape"].tolist()
        self._codes, self._scales, self._zeros = (
            state[name].numpy() for name in ("codes", "scales", "zeros")
        )
        kind = KINDS[self._codes.dtype.name]
        self._words = -(-self._in_features // kind.depth) * kind.elements
        self._quantizes = kind.quantizes

    def matmul(
        self, x: torch.Tensor, bias: torch.Tensor | None, exchange: Exchange | None = None
    ) -> torch.Tensor:
        maxima = _NO_FLOATS
        if exchange is not None and self._quantizes:
            maxima = exchange(x.abs().amax(dim=1)).numpy()
        out = torch.empty(x.shape[0], self._out_features)
        linear(
            x.contiguous().numpy(),
            self._codes,
            self._scales,
            self._zeros,
            maxima,
            _NO_FLOATS if bias is None else bias.float().numpy(),
            self._words,
            out.numpy(),
        )
        return out

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        panel, column = np.divmod(indices.numpy(), PANEL)
        codes = self._codes
        if codes.dtype == np.uint32:
            halves = codes.view(np.uint16).reshape(*codes.shape, 2)
            chosen = halves[panel, :, column % LANES, column // LANES]
        else:
            chosen = codes[panel, :, column]
        values = _values(torch.from_numpy(np.ascontiguousarray(chosen)))
        values = values[:, : self._in_features]
        if not len(self._scales):
            return values
        groups = values.view(len(values), self._scales.shape[1], -1)
        if len(self._zeros):
            groups = groups - torch.from_numpy(self._zeros[panel, :, column, None]).float()
        groups = groups * torch.from_numpy(self._scales[panel, :, column, None])
        return groups.flatten(1)

    def state(self) -> dict[str, torch.Tensor]:
        return self._state


def _values(codes: torch.Tensor) -> torch.Tensor:
    """Codes of T columns, of any kind -> float32 [T, in, padded]. Values of fp8 are smaller by
    `_FP8_FACTOR`."""
    if codes.dtype == torch.uint16:
        codes = codes.view(torch.bfloat16)
    elif codes.dtype == torch.int32:
        fours = codes.view(torch.uint8).unflatten(1, (-1, 4))
        codes = torch.stack((fours & 15, fours >> 4), dim=2)
    elif codes.dtype == torch.int8:
        codes = codes.view(torch.uint8)
    elif codes.dtype == torch.uint8:
        return codes.view(torch.float8_e4m3fn).float() / _FP8_FACTOR
    return codes.float().flatten(1)


def pack_floats(weight: torch.Tensor) -> PanelWeight:
    """Packs weight [out, in] float32 or bfloat16."""
    if weight.dtype == torch.float32:
        codes = _in_panels(weight, 1).squeeze(3)
    elif cpu_features.has("avx512bf16"):
        codes = _in_panels(weight.view(torch.int16), 2).view(torch.uint16)
    else:
        # [panels, in, PANEL] -> [panels, in, LANES, 2]
        columns = _in_panels(weight.view(torch.int16), 1).unflatten(2, (2, LANES)).squeeze(4)
        codes = columns.transpose(2, 3).contiguous().view(torch.uint32).squeeze(3)
    nothing = torch.empty(0, 0, 0)
    return _weight(codes, nothing, nothing.int(), *weight.shape)


def pack_quantized(weight: QuantizedWeight) -> PanelWeight:
    """Packs a quantized weight.

    Raises:
        ModelError: the group size is not a multiple of the inputs that a step of the loop takes.
    """
    out_features, in_features = weight.shape
    scales = weight.scales
    if weight.format == "fp8":
        codes = _in_panels(weight.codes.view(torch.uint8), 1).squeeze(3)
        scales, zeros = scales * _FP8_FACTOR, torch.empty(0, 0, 0, dtype=torch.int32)
        return _weight(codes, _columns(scales), zeros, out_features, in_features)
    int8 = weight.format == "int8"
    depth = 4 if int8 else 8
    if scales.shape[1] > 1 and weight.group_size % depth:
        raise ModelError(
            f"group_size: {weight.group_size} is not a multiple of {depth}, as {weight.format} "
            "weights on a CPU need"
        )
    if int8:
        # An unsigned byte holds code + 128.
        codes = _in_panels(weight.codes.view(torch.uint8) ^ 128, 4, fill=128).view(torch.int8)
    else:
        nibbles = torch.stack((weight.codes & 15, weight.codes >> 4), dim=2).flatten(1)
        fours = _in_panels(nibbles, 8).unflatten(3, (2, 4))
        codes = (fours[..., 0, :] | (fours[..., 1, :] << 4)).contiguous()
        codes = codes.view(torch.int32).squeeze(3)
    zero = 0 if int8 else 8
    zeros = torch.full_like(scales, zero) if weight.zeros is None else weight.zeros
    zeros = zeros.int() + (128 if int8 else 0)
    return _weight(codes, _columns(scales), _columns(zeros), out_features, in_features)


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
