"""The structures that the native library takes, field by field as in its headers. All fields have 8
bytes."""

from __future__ import annotations

from ctypes import Structure, c_double, c_int64, c_void_p
from enum import IntEnum
from typing import Any


class Phase(IntEnum):
    """The phases of a program; see `native/program.cpp`."""

    EMBED = 0
    NORM = 1
    PACK = 2
    PRODUCT = 3
    ROPE_STORE = 4
    ATTEND = 5
    SILU = 6
    MAXIMA = 7


class Kind(IntEnum):
    """How the weights of a panel lie in memory; see `native/products.h`."""

    FLOAT32 = 0
    BFLOAT16 = 1
    BF16_PAIRS = 2
    INT8 = 3
    INT4 = 4


def _structure(name: str, **fields: Any) -> Any:
    return type(name, (Structure,), {"_fields_": list(fields.items())})


Op = _structure("Op", phase=c_int64, args=c_void_p)
Step = _structure(
    "Step",
    tokens=c_int64,
    sequences=c_int64,
    input_ids=c_void_p,
    last_tokens=c_void_p,
    positions=c_void_p,
    slots=c_void_p,
    query_starts=c_void_p,
    context_lens=c_void_p,
    block_table=c_void_p,
    table_offsets=c_void_p,
    temperatures=c_void_p,
    uniforms=c_void_p,
)
Weight = _structure(
    "Weight",
    kind=c_int64,
    inputs=c_int64,
    outputs=c_int64,
    groups=c_int64,
    piece=c_int64,
    codes=c_void_p,
    scales=c_void_p,
    zeros=c_void_p,
    bias=c_void_p,
)
Packed = _structure("Packed", words=c_void_p, sums=c_void_p, scales=c_void_p, stride=c_int64)
PackTo = _structure("PackTo", weight=c_void_p, out=Packed)
Vector = _structure("Vector", data=c_void_p, is_bfloat16=c_int64)
Cache = _structure(
    "Cache",
    data=c_void_p,
    type=c_int64,
    blocks=c_int64,
    block_size=c_int64,
    kv_heads=c_int64,
    head_dim=c_int64,
)
EmbedArgs = _structure(
    "EmbedArgs",
    table=Vector,
    codes=c_void_p,
    size=c_int64,
    start=c_int64,
    count=c_int64,
    out=c_void_p,
)
NormArgs = _structure(
    "NormArgs",
    rows=c_void_p,
    last_only=c_int64,
    size=c_int64,
    x=c_void_p,
    residual=c_void_p,
    weight=Vector,
    eps=c_double,
    out=c_void_p,
    pack=PackTo,
)
PackArgs = _structure(
    "PackArgs", weight=c_void_p, rows=c_void_p, x=c_void_p, tops=c_void_p, out=Packed
)
ProductArgs = _structure(
    "ProductArgs", weight=c_void_p, rows=c_void_p, x=Packed, out=c_void_p, next=c_void_p
)
SiluArgs = _structure(
    "SiluArgs", rows=c_void_p, size=c_int64, gate_up=c_void_p, out=c_void_p, pack=PackTo
)
Tops = _structure("Tops", data=c_void_p, stride=c_int64, first_input=c_int64, piece=c_int64)
MaximaArgs = _structure(
    "MaximaArgs",
    rows=c_void_p,
    size=c_int64,
    x=c_void_p,
    out=c_void_p,
    stride=c_int64,
    first_input=c_int64,
    piece=c_int64,
)
RopeStoreArgs = _structure(
    "RopeStoreArgs",
    cache=Cache,
    qkv=c_void_p,
    q=c_void_p,
    heads=c_int64,
    q_weight=c_void_p,
    k_weight=c_void_p,
    weight_type=c_int64,
    eps=c_double,
    cos_sin=c_void_p,
)
AttendArgs = _structure(
    "AttendArgs", cache=Cache, q=c_void_p, out=c_void_p, heads=c_int64, scale=c_double
)
