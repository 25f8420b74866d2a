"""Cuts quantized weights by column and joins them by row."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch

from worker_svc.errors import ModelError
from worker_svc.weights.quantization.formats import QuantizedWeight


def pack_int4(codes: torch.Tensor) -> torch.Tensor:
    """Codes [out, in] uint8, 0 to 15 -> two codes per byte, [out, in / 2], see `QuantizedWeight`.

    Raises:
        ModelError: the number of inputs is odd.
    """
    if codes.shape[1] % 2:
        raise ModelError(f"quantization: int4 weights of {codes.shape[1]} inputs, an odd number")
    return codes[:, ::2] | codes[:, 1::2] << 4


def per_group(
    per_block: torch.Tensor, block: tuple[int, int], rows: range, columns: range
) -> torch.Tensor:
    """Scales or zeros of all blocks of a matrix, each of `block` = (rows, columns) -> the scales or
    zeros of `rows` and `columns`, [len(rows), groups].

    If a boundary of a block or of `columns` cuts a group, all groups become smaller. So every input
    keeps its scale for any number of ranks.

    Raises:
        ModelError: there are too few scales or zeros.
    """
    device = per_block.device
    height, width = block
    needed = [-(-rows.stop // height), -(-columns.stop // width)]
    if any(a < b for a, b in zip(per_block.shape, needed, strict=True)):
        raise ModelError(
            f"quantization_config: blocks of {height} by {width} need scales or zeros of at least "
            f"{needed}, the checkpoint has {list(per_block.shape)}"
        )
    row_index = torch.arange(rows.start, rows.stop, device=device) // height
    if per_block.shape[1] == 1:
        return per_block[row_index]
    size = math.gcd(width, columns.start, columns.stop)
    column_index = torch.arange(columns.start, columns.stop, size, device=device) // width
    return per_block[row_index][:, column_index]


def cut_columns(weight: QuantizedWeight, columns: range) -> QuantizedWeight:
    """The `columns` of a whole matrix.

    Raises:
        ModelError: a boundary of `columns` cuts a byte of two codes.
    """
    out, in_features = weight.shape
    if len(columns) == in_features:
        return weight
    start, stop = columns.start, columns.stop
    if weight.format == "int4":
        if start % 2 or stop % 2:
            raise ModelError(f"tp: ranks would cut int4 weights between inputs {start} and {stop}")
        start, stop = start // 2, stop // 2
    place = (1, weight.group_size), range(out), columns
    return QuantizedWeight(
        weight.format,
        weight.codes[:, start:stop],
        per_group(weight.scales, *place),
        None if weight.zeros is None else per_group(weight.zeros, *place),
    )


def join_rows(pieces: Iterable[tuple[str, QuantizedWeight]], num_rows: int) -> QuantizedWeight:
    """Fills a matrix [num_rows, in] with rows as they are read, so that memory never holds a second
    copy of it. Rows after those of the pieces are zero.

    Args:
        pieces: at least one, each with the name of its layer and maybe without rows.

    Raises:
        ModelError: pieces have different formats or groups. The message names the layer.
    """
    whole, end = None, 0
    for name, rows in pieces:
        if whole is None:
            codes, scales = (_zeros(each, num_rows) for each in (rows.codes, rows.scales))
            whole = QuantizedWeight(rows.format, codes, scales)
        elif (rows.format, rows.group_size) != (whole.format, whole.group_size):
            raise ModelError(
                f"quantization_config: {name} is {rows.format} in groups of {rows.group_size}, but "
                f"is multiplied together with {whole.format} in groups of {whole.group_size}"
            )
        place = slice(end, end + len(rows.codes))
        end = place.stop
        whole.codes[place] = rows.codes
        whole.scales[place] = rows.scales
        if rows.zeros is not None:
            zeros = whole.zeros
            if zeros is None:
                zeros = _zeros(rows.zeros, num_rows).fill_(8 if rows.format == "int4" else 0)
                whole = replace(whole, zeros=zeros)
            zeros[place] = rows.zeros
    assert whole
    return whole


def _zeros(like: torch.Tensor, num_rows: int) -> torch.Tensor:
    return like.new_zeros(num_rows, like.shape[1])
