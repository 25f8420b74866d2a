"""The structures that the native library takes, field by field as in its headers, and addresses of
tensors for them. All fields have 8 bytes."""

from __future__ import annotations

from ctypes import Structure, c_double, c_int64, c_void_p
from enum import IntEnum
from functools import partial
from typing import Any

import torch

from worker_svc.kernels.ops import Activation
from worker_svc.step.tensors import StepTensors

INT, DOUBLE, POINTER = c_int64, c_double, c_void_p
LANES = 16  # the numbers of a vector, as in `native/simd.h`


class Phase(IntEnum):
    """The phases of a program; see `native/program.cpp`."""

    EMBED = 0
    NORM = 1
    PACK = 2
    PRODUCT = 3
    ROPE_STORE = 4
    ATTEND = 5
    ACTIVATE = 6
    MAXIMA = 7
    SUM_SQUARES = 8
    SCALE_PARTS = 9
    CHOOSE = 10
    SORT = 11
    GATHER = 12
    COMBINE = 13


ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh")  # as numbered in `native/rows.h`


class Kind(IntEnum):
    """How the weights of a panel lie in memory; see `native/products.h`."""

    FLOAT32 = 0
    BFLOAT16 = 1
    BF16_PAIRS = 2
    INT8 = 3
    INT4 = 4
    INT6 = 5


QKNorm = tuple[torch.Tensor, torch.Tensor, float]  # weights of queries and of keys, epsilon


def structure(name: str, *fields: tuple[str, Any]) -> Any:
    """Makes a ctypes structure.

    Args:
        fields: names of fields, separated by spaces, and their type.
    """
    pairs = [(each, type_) for names, type_ in fields for each in names.split()]
    return type(name, (Structure,), {"_fields_": pairs})


Op = structure("Op", ("phase", INT), ("args", POINTER))
Times = structure("Times", ("work wait", DOUBLE))
Step = structure(
    "Step",
    ("tokens sequences tables", INT),
    ("input_ids last_tokens positions slots query_starts context_lens", POINTER),
    ("block_table table_offsets temperatures uniforms", POINTER),
)
Weight = structure(
    "Weight", ("kind inputs outputs groups segment", INT), ("codes scales zeros bias", POINTER)
)
Packed = structure("Packed", ("words sums scales", POINTER), ("stride", INT))
PackTo = structure("PackTo", ("weight", POINTER), ("out", Packed))
Vector = structure("Vector", ("data", POINTER), ("is_bfloat16", INT))
Cache = structure("Cache", ("data", POINTER), ("type blocks block_size kv_heads head_dim", INT))
EmbedArgs = structure(
    "EmbedArgs",
    ("table", Vector),
    ("codes", POINTER),
    ("size start count", INT),
    ("scale", DOUBLE),
    ("out", POINTER),
)
NormArgs = structure(
    "NormArgs",
    ("rows", POINTER),
    ("x_is_whole residual_is_whole size", INT),
    ("x residual", POINTER),
    ("weight", Vector),
    ("eps", DOUBLE),
    ("out", POINTER),
    ("pack", PackTo),
)
PackArgs = structure("PackArgs", ("weight rows x tops", POINTER), ("out", Packed))
Groups = structure("Groups", ("starts", POINTER), ("count", INT))
ProductArgs = structure(
    "ProductArgs",
    ("weight rows", POINTER),
    ("x", Packed),
    ("out", POINTER),
    ("groups", Groups),
    ("next", POINTER),
    ("next_groups", Groups),
)
ChooseArgs = structure(
    "ChooseArgs",
    ("rows", POINTER),
    ("experts per_token normalized", INT),
    ("logits chosen factors", POINTER),
)
SortArgs = structure(
    "SortArgs",
    ("rows", POINTER),
    ("per_token first_expert experts", INT),
    ("chosen places starts", POINTER),
)
GatherArgs = structure(
    "GatherArgs",
    ("rows", POINTER),
    ("per_token", INT),
    ("weight places", POINTER),
    ("x out", Packed),
)
CombineArgs = structure(
    "CombineArgs",
    ("rows", POINTER),
    ("per_token size", INT),
    ("places factors x out", POINTER),
)
ActivateArgs = structure(
    "ActivateArgs",
    ("rows", POINTER),
    ("size activation", INT),
    ("gate_up out", POINTER),
    ("pack", PackTo),
)
PartsArgs = structure(
    "PartsArgs",
    ("rows", POINTER),
    ("stride size_0 size_1 total_size_0 total_size_1", INT),
    ("x squares", POINTER),
    ("weight", Vector),
    ("eps", DOUBLE),
)
Tops = structure("Tops", ("data", POINTER), ("stride first_input segment", INT))
MaximaArgs = structure(
    "MaximaArgs",
    ("rows", POINTER),
    ("size", INT),
    ("x out", POINTER),
    ("stride first_input segment", INT),
)
RopeStoreArgs = structure(
    "RopeStoreArgs",
    ("cache", Cache),
    ("table", INT),
    ("qkv q", POINTER),
    ("heads", INT),
    ("q_weight k_weight", Vector),
    ("eps", DOUBLE),
    ("cos_sin", POINTER),
)
AttendArgs = structure(
    "AttendArgs",
    ("cache", Cache), ("table", INT), ("q out", POINTER), ("heads", INT), ("scale", DOUBLE),
    ("window", INT),
)  # fmt: skip


def _address(dtype: torch.dtype, tensor: torch.Tensor) -> int:
    assert tensor.dtype == dtype
    assert tensor.is_contiguous()
    return tensor.data_ptr()


# Each takes a contiguous tensor and returns the address of its first number.
int32s = partial(_address, torch.int32)
int64s = partial(_address, torch.int64)
float32s = partial(_address, torch.float32)
float64s = partial(_address, torch.float64)


def rows_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of the first row of [R, size] float32, and the distance between rows."""
    assert tensor.dtype == torch.float32
    assert tensor.stride(1) == 1 or tensor.shape[1] == 1
    return tensor.data_ptr(), tensor.stride(0)


def vector(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return Vector()
    assert tensor.dtype in (torch.float32, torch.bfloat16)
    return Vector(tensor.data_ptr(), tensor.dtype == torch.bfloat16)


def fill_step(step: Any, tensors: StepTensors, last_tokens: torch.Tensor) -> None:
    """Sets the columns of a step, which the caller keeps alive."""
    step.tokens, step.sequences = len(tensors.input_ids), len(tensors.context_lens)
    step.input_ids = tensors.input_ids.data_ptr()
    step.last_tokens = last_tokens.data_ptr()
    step.positions = tensors.positions.data_ptr()
    step.tables = len(tensors.slot_mapping) // max(step.tokens, 1)
    step.slots = tensors.slot_mapping.data_ptr()
    step.query_starts = tensors.query_starts.data_ptr()
    step.context_lens = tensors.context_lens.data_ptr()
    step.block_table = tensors.block_table.data_ptr()
    step.table_offsets = tensors.table_offsets.data_ptr()
