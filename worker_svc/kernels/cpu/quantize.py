"""Quantizes weights to integers in one pass in C++ (`native/quantize.cpp`), with results that
equal `quantization.quantize`'s to the last bit."""

from __future__ import annotations

from ctypes import byref

import torch

from worker_svc.kernels.cpu.library import library, team
from worker_svc.kernels.cpu.structs import DOUBLE, INT, POINTER, float32s, structure
from worker_svc.weights.quantization.formats import Format, QuantizedWeight
from worker_svc.weights.quantization.quantize import DIVISORS, TOPS, empty
from worker_svc.weights.quantization.quantize import quantize as quantize_in_torch

_DIVISORS = torch.tensor(DIVISORS)


_QuantizeArgs = structure(
    "QuantizeArgs",
    ("weight", POINTER),
    ("rows columns", INT),
    ("scales", POINTER),
    ("groups", INT),
    ("codes", POINTER),
    ("top", DOUBLE),
    ("divisors", POINTER),
    ("num_divisors", INT),
)


def quantize(weight: torch.Tensor, format: Format) -> QuantizedWeight:
    """W [out, in] float32 -> its codes and scales.

    Raises:
        ModelError: as `group_size`.
    """
    if format == "fp8":
        return quantize_in_torch(weight, format)
    weight = weight.contiguous()
    out, columns = weight.shape
    quantized = empty(out, columns, format)
    groups = quantized.scales.shape[1]
    sizes = (out, columns) if format == "int4" else (out * groups, columns // groups)
    arguments = _QuantizeArgs(
        float32s(weight),
        *sizes,
        float32s(quantized.scales),
        groups,
        quantized.codes.data_ptr(),
        TOPS.get(format, 0),
        float32s(_DIVISORS),
        len(DIVISORS),
    )
    kernel = library().nano_quantize_int4 if format == "int4" else library().nano_quantize
    kernel(*team(), byref(arguments))
    return quantized
