"""Quantizes weights to int8 and int4 in one pass in C++ (`native/quantize.cpp`), with results that
equal `quantization.quantize`'s to the last bit."""

from __future__ import annotations

from ctypes import byref

import torch

from worker_svc.kernels.cpu.library import library, team
from worker_svc.kernels.cpu.structs import INT, POINTER, float32s, structure
from worker_svc.weights.quantization.formats import Format, QuantizedWeight
from worker_svc.weights.quantization.quantize import DIVISORS, empty
from worker_svc.weights.quantization.quantize import quantize as quantize_in_torch

_DIVISORS = torch.tensor(DIVISORS)


_QuantizeArgs = structure(
    "QuantizeArgs",
    ("weight", POINTER),
    ("rows columns", INT),
    ("scales", POINTER),
    ("groups", INT),
    ("codes divisors", POINTER),
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
    arguments = _QuantizeArgs(
        float32s(weight),
        out,
        columns,
        float32s(quantized.scales),
        quantized.scales.shape[1],
        quantized.codes.data_ptr(),
        float32s(_DIVISORS),
        len(DIVISORS),
    )
    kernel = library().nano_quantize_int8 if format == "int8" else library().nano_quantize_int4
    kernel(*team(), byref(arguments))
    return quantized
