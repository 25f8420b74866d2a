"""The interface of the operations that a device offers to layers and sampling."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F

from worker_svc.kv_cache import NewTensor
from worker_svc.weights.quantization.formats import Format, QuantizedWeight

# gelu_tanh is GELU's approximation by tanh (Hendrycks and Gimpel, 2016).
Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class Experts:
    """A mixture of experts, of which each token takes the `per_token` with the largest logits.

    Args:
        of_rank: those that this rank has, of `count`.
        normalized: whether a token's factors add up to 1. Else they are a softmax over all experts.
        activation: that of an expert, which is a gated feed-forward layer.
    """

    count: int
    of_rank: range
    per_token: int
    normalized: bool
    activation: Activation


@dataclass(frozen=True)
class Exchange:
    """The ranks that hold the other columns of x.

    Args:
        first: this rank's first column.
        columns: those of all ranks.
        maximum: takes the maximum over the ranks, in place.
    """

    first: int
    columns: int
    maximum: Callable[[torch.Tensor], torch.Tensor]


class PackedWeight(Protocol):
    """A weight matrix W [out_features, in_features] in the layout that the device multiplies
    fastest."""

    def matmul(
        self, x: torch.Tensor, bias: torch.Tensor | None, exchange: Exchange | None = None
    ) -> torch.Tensor:
        """x [T, in] -> x Wᵀ + bias [out], [T, out] in the dtype of x.

        Args:
            exchange: given if other ranks hold more columns of x. If x has to be quantized, its
                largest magnitudes are those of all columns.
        """
        ...

    def state(self) -> dict[str, torch.Tensor] | None:
        """The tensors from which `Ops.unpack` makes an equal weight, in this process or in another
        process on the same kind of CPU. None if only copies of them would do."""
        ...


class PlainWeight:
    """W in its own layout, multiplied by `F.linear`."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def matmul(
        self, x: torch.Tensor, bias: torch.Tensor | None, exchange: Exchange | None = None
    ) -> torch.Tensor:
        bias = None if bias is None else bias.to(self.weight.dtype)
        return F.linear(x, self.weight, bias)

    def matmul_into(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Writes the product with x [T, in] to `out` [T, out] -> `out`."""
        return torch.mm(x, self.weight.t(), out=out)

    def state(self) -> dict[str, torch.Tensor]:
        return {"weight": self.weight}


class Ops(Protocol):
    """The operations besides attention. Two modules of functions implement them: `kernels.cpu.ops`
    in C++ and `kernels.triton.ops` in Triton."""

    layout: str  # names the layout that `pack` makes, and the kind of CPU that it is made for

    def quantize(self, weight: torch.Tensor, format: Format) -> QuantizedWeight:
        """Does what `quantization.quantize.quantize` does, maybe faster."""
        ...

    def table_format(self, format: Format) -> Format:
        """The format of embedding and head where layers are quantized to `format`. In 4 bits they
        would lose more accuracy than layers do."""
        ...

    def pack(self, weight: torch.Tensor | QuantizedWeight, dtype: torch.dtype) -> PackedWeight:
        """Packs `weight` [out, in]. The caller should drop it, since the result may be a copy.

        Args:
            dtype: the model's, in which steps compute (a CPU computes in float32).

        Raises:
            ModelError: this device has no kernel for this format.
        """
        ...

    def pack_experts(
        self,
        weights: Iterable[torch.Tensor | QuantizedWeight],
        count: int,
        dtype: torch.dtype,
        new: NewTensor,
    ) -> PackedWeight:
        """Packs `count` equal matrices, one per expert, for `mix_experts`. Each is read when the
        one before it is packed. On a CPU, `new` makes the memory.

        Raises:
            ModelError: as `pack`.
        """
        ...

    def unpack(self, state: dict[str, torch.Tensor]) -> PackedWeight:
        """Makes the weight with this `state` without copying it: it may be a mapped file."""
        ...

    def embed(
        self,
        input_ids: torch.Tensor,
        last_tokens: torch.Tensor,
        weight: PackedWeight,
        start: int,
        count: int,
        scale: float = 1.0,
    ) -> torch.Tensor:
        """input_ids [T] int32 -> scale · rows of weight, [T, hidden]. An id −1−r stands for
        last_tokens[r]. An id outside [start, start + count) gives zeros, every other id gives row
        id − start."""
        ...

    def new_rows(self, input_ids: torch.Tensor, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """New rows [T, columns] for tokens input_ids [T], to be filled. A CPU computes in
        float32."""
        ...

    def rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        """x [T, size] / rms(x) · weight [size], or without a weight a copy of x. If there is a
        residual [T, size], x is added to it in place, and the norm is that of the sum."""
        ...

    def sum_rows(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, columns] -> the sum of each row, [T], whose bits do not depend on other rows."""
        ...

    def sum_squares(self, x: torch.Tensor, sizes: tuple[int, int]) -> torch.Tensor:
        """x [T, columns] -> the sums of squares of its first sizes[0] columns, and of the next
        sizes[1], [T, 2] float32."""
        ...

    def scale_parts(
        self,
        x: torch.Tensor,
        squares: torch.Tensor,
        weight: torch.Tensor,
        sizes: tuple[int, int],
        total_sizes: tuple[int, int],
        eps: float,
    ) -> torch.Tensor:
        """Applies `rms_norm` to two parts of x in place -> x.

        x            [T, columns], whose first sizes[0] + sizes[1] columns are the parts
        squares      [T, 2] float32, the parts' sums of squares, over all ranks
        weight       [sizes[0] + sizes[1]]
        total_sizes  the parts' sizes, over all ranks
        """
        ...

    def last_rows(self, x: torch.Tensor, query_starts: torch.Tensor) -> torch.Tensor:
        """x [T, size] -> the rows [S, size] of the sequences' last tokens. query_starts [S + 1]."""
        ...

    def activate_and_multiply(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """gate_up [T, 2 · size], gate before up -> activation(gate) · up [T, size]"""
        ...

    def mix_experts(
        self,
        x: torch.Tensor,
        logits: torch.Tensor,
        gate_up: PackedWeight,
        down: PackedWeight,
        experts: Experts,
    ) -> torch.Tensor:
        """x [T, in], logits [T, experts] float32 -> the sum over a token's experts of the factor
        times down(activation(gate) · up), [T, out]. Of equal logits the first is taken. Experts of
        other ranks add nothing."""
        ...

    def chunk_statistics(
        self, logits: torch.Tensor, chunk_size: int, num_tokens: int, temperatures: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """logits [S, C · chunk_size], temperatures [S] float32 -> per chunk the largest logit m and
        the sum of exp((logit − m) / temperature), both [S, C] float32.

        Only the first num_tokens columns count. If the temperature is 0, the sums mean nothing.
        """
        ...

    def select_tokens(
        self,
        logits: torch.Tensor,
        chunk_size: int,
        num_tokens: int,
        maxima: torch.Tensor,
        sums: torch.Tensor,
        first_chunk: int,
        temperatures: torch.Tensor,
        uniforms: torch.Tensor,
    ) -> torch.Tensor:
        """Selects a token per row -> ids [S] int32, −1 where another rank has the chosen chunk.

        maxima and sums [S, C_all] are the statistics of all ranks' chunks. This rank's chunks begin
        at first_chunk. uniforms [S] float64 holds a uniform random number per row.
        """
        ...

    def store_tokens(
        self,
        cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        input_ids: torch.Tensor,
        last_tokens: torch.Tensor,
    ) -> None:
        """Stores input_ids [T] int32 in the slots slot_mapping [T] int32 (−1: nowhere) of cache
        [slots] int32. An id −1−r stands for last_tokens[r] int32."""
        ...

    def penalize(
        self,
        logits: torch.Tensor,
        start: int,
        count: int,
        tokens: torch.Tensor,
        block_size: int,
        block_table: torch.Tensor,
        table_offsets: torch.Tensor,
        rows: torch.Tensor,
        context_lens: torch.Tensor,
        prompt_lens: torch.Tensor,
        repetition: torch.Tensor,
        presence: torch.Tensor,
        frequency: torch.Tensor,
    ) -> None:
        """Penalizes logits [F, shard] float32 in place for the tokens that a sequence already has.
        The first columns are this rank's ids [start, start + count). The other columns stay.

        Row f is sequence rows[f] of the step, with context_lens[rows[f]] positions. tokens [slots]
        int32 holds its tokens: position p is in block p // block_size of the sequence's part of the
        ragged table. Positions from prompt_lens[f] on are generated. With r = repetition[f], the
        logit l of each of these tokens becomes l / r, or l · r if it is negative. The logit of a
        token generated n > 0 times then loses frequency[f] · n + presence[f]. These are the
        definitions of transformers and vLLM.

            block_table               int32 [blocks of all sequences]
            table_offsets             int32 [S + 1]
            context_lens              int32 [S]
            rows, prompt_lens         int32 [F]
            repetition and the others float32 [F]
        """
        ...

    def apply_masks(
        self,
        logits: torch.Tensor,
        start: int,
        count: int,
        masked: torch.Tensor,
        masks: torch.Tensor,
    ) -> None:
        """Sets logits [F, shard] float32 of rows masked [M] int32 to −inf where masks [M, W] has a
        0. Token t is bit t % 32, the lowest first, of int32 number t // 32. The columns are those
        of `penalize`."""
        ...

    def weigh_by_key(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        num_tokens: int,
        maxima: torch.Tensor | None,
        scales: torch.Tensor | None,
        low: torch.Tensor,
        shifts: torch.Tensor,
        bins: torch.Tensor,
    ) -> None:
        """Adds a histogram of the logits' keys to bins [G, BINS] int64.

        Row g weighs the first num_tokens logits [F, shard] float32 of row rows[g], int32 [G]. A key
        is in bin (key − low[g]) >> shifts[g]. Keys and BINS are those of `kernels.logits`. low,
        which holds keys, and shifts are int64 [G]. Logits of −inf or NaN, keys below low and rows
        of negative shift are in no bin.

        A logit weighs 1 or, if there are maxima and scales float32 [G],
        ⌊2⁴⁰ · exp((logit − maxima[g]) · scales[g])⌋ in every column. The sum of such integers does
        not depend on their order.
        """
        ...

    def pick_bins(
        self,
        bins: torch.Tensor,
        targets: torch.Tensor,
        low: torch.Tensor,
        shifts: torch.Tensor,
        above: torch.Tensor,
    ) -> None:
        """Picks, per row of bins [G, BINS], the last bin whose suffix sum plus above [G] reaches
        targets [G], else bin 0.

        Moves low [G] to the beginning of that bin, and sets above to the weight after the bin. Sets
        shifts [G] to the shift that settles the next bits of low. The shift is −1 if there are no
        next bits, or if the weight from low on is just the target. All are int64. Rows of negative
        shift stay.
        """
        ...
