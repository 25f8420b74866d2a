"""The operations that layers ask of the device they run on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F

from worker_svc.weights.quantization.formats import Format, QuantizedWeight

Exchange = Callable[[torch.Tensor], torch.Tensor]


class PackedWeight(Protocol):
    """A weight matrix W [out_features, in_features] in the layout that the device multiplies
    fastest."""

    def matmul(
        self, x: torch.Tensor, bias: torch.Tensor | None, exchange: Exchange | None = None
    ) -> torch.Tensor:
        """x [T, in] -> x Wᵀ + bias [out], [T, out] in the dtype of x.

        Args:
            exchange: for x that other ranks hold more columns of: the largest magnitudes [T] of
                this rank's columns -> those of all ranks'. Called if x has to be quantized.
        """
        ...

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Rows `indices` [T] int64 of W, [T, in]."""
        ...

    def state(self) -> dict[str, torch.Tensor]:
        """The tensors that `Ops.unpack` makes an equal weight of, in this process or another on
        the same kind of CPU."""
        ...


class PlainWeight:
    """W as it is, multiplied by `F.linear`."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def matmul(
        self, x: torch.Tensor, bias: torch.Tensor | None, exchange: Exchange | None = None
    ) -> torch.Tensor:
        bias = None if bias is None else bias.to(self.weight.dtype)
        return F.linear(x, self.weight, bias)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        return F.embedding(indices, self.weight)

    def state(self) -> dict[str, torch.Tensor]:
        return {"weight": self.weight}


class Ops(Protocol):
    """The operations between matrix products and attention, implemented as modules of functions in
    numba (`kernels.cpu.ops`) or Triton (`kernels.triton.ops`)."""

    layout: str  # names what `pack` does, with the kind of CPU it does it for

    def quantize(self, weight: torch.Tensor, format: Format) -> QuantizedWeight:
        """`quantization.quantize.quantize`, or the same done faster."""
        ...

    def pack(self, weight: torch.Tensor | QuantizedWeight, dtype: torch.dtype) -> PackedWeight:
        """Packs `weight` [out, in]. The caller should drop it, since the result may be a copy.

        Args:
            dtype: of the model, in which steps compute (on a CPU in float32).

        Raises:
            ModelError: nothing multiplies this format on this device.
        """
        ...

    def unpack(self, state: dict[str, torch.Tensor]) -> PackedWeight:
        """Makes the weight whose `state` this is, without a copy: it may be a mapped file."""
        ...

    def embed(
        self,
        input_ids: torch.Tensor,
        last_tokens: torch.Tensor,
        weight: PackedWeight,
        start: int,
        count: int,
    ) -> torch.Tensor:
        """input_ids [T] int32 -> rows of weight, [T, hidden]. An id −1−r stands for last_tokens[r],
        ids outside [start, start + count) give zeros, the others row id − start."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [T, size] / rms(x) · weight [size]"""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Adds x to residual [T, size] in place -> the sum normalized, as `rms_norm` does."""
        ...

    def silu_and_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [T, 2 · size], gate before up -> silu(gate) · up [T, size]"""
        ...

    def chunk_statistics(
        self, logits: torch.Tensor, chunk_size: int, num_tokens: int, temperatures: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """logits [S, C · chunk_size], of which the first num_tokens columns count, temperatures [S]
        float32 -> per chunk the largest logit m and the sum of exp((logit − m) / temperature), both
        [S, C] float32; where the temperature is 0 the sums mean nothing."""
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
        """Selects tokens by the statistics of all ranks' chunks [S, C_all], of which this rank's
        begin at first_chunk, and a uniform number per row [S] float64 -> token ids [S] int32, −1
        where the chosen chunk is another rank's."""
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
        This rank's ids [start, start + count) are the first columns; the other columns stay.

        Row f is sequence rows[f] of the step, of context_lens[rows[f]] positions. Position p is in
        tokens [slots] int32, in block p // block_size of the sequence's part of the ragged table;
        positions from prompt_lens[f] on are generated. The logit l of each of these tokens becomes
        l / r or, if negative, l · r, with r = repetition[f]; that of one generated n > 0 times then
        loses frequency[f] · n + presence[f]. (As in transformers and vLLM.)

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
        0: token t is bit t % 32, the lowest first, of int32 number t // 32. Columns as in
        `penalize`."""
        ...

    def count_by_key(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        num_tokens: int,
        low: torch.Tensor,
        shifts: torch.Tensor,
        bins: torch.Tensor,
    ) -> None:
        """Adds to bins [G, BINS] int64 how many of the first num_tokens logits of row rows[g]
        (int32 [G]; logits [F, shard] float32) have the bin's number as (key − low[g]) >> shifts[g].
        Keys and BINS are those of `kernels.logits`; low, which holds keys, and shifts are int64
        [G]. Logits of −inf or NaN and keys below low are in no bin, nor are rows of negative
        shift."""
        ...

    def weigh_by_key(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        num_tokens: int,
        maxima: torch.Tensor,
        scales: torch.Tensor,
        low: torch.Tensor,
        shifts: torch.Tensor,
        bins: torch.Tensor,
    ) -> None:
        """Like `count_by_key`, but a logit counts ⌊2⁴⁰ · exp((logit − maxima[g]) · scales[g])⌋,
        both float32 [G], the same in whichever column: such integers add up alike in any order."""
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
        targets [G], else bin 0. Moves low [G] to its beginning, sets above to the weight after it,
        and shifts [G] to what settles its next bits: −1 if there are none, or if the weight from
        low on is just the target. All int64. Rows of negative shift stay."""
        ...
