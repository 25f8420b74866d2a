"""What the layers ask of the device they run on."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F


class PackedWeight(Protocol):
    """A weight matrix W [out_features, in_features] in the layout that the device multiplies with
    fastest."""

    def matmul(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [T, in] -> x Wᵀ + bias [out], [T, out] in the dtype of x."""
        ...


class PlainWeight:
    """W as it is, through `F.linear`."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def matmul(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, self._weight, bias)


class Ops(Protocol):
    """The operations between matrix products and attention: modules of functions, of numba
    (`kernels.cpu.ops`) or Triton (`kernels.triton.ops`)."""

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        """Packs `weight` [out, in]. The caller should let go of it, since this may be a copy."""
        ...

    def embed(
        self,
        input_ids: torch.Tensor,
        last_tokens: torch.Tensor,
        weight: torch.Tensor,
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
        """The statistics of all chunks of all ranks [S, C_all], of which this rank's begin at
        first_chunk, and a uniform number per row [S] float64 -> token ids [S] int32, −1 where the
        chosen chunk is another rank's."""
        ...

    def store_tokens(
        self,
        cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        input_ids: torch.Tensor,
        last_tokens: torch.Tensor,
    ) -> None:
        """input_ids [T] int32 into the slots slot_mapping [T] int32 (−1: nowhere) of cache [slots]
        int32. An id −1−r stands for last_tokens[r] int32."""
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
        """Penalizes logits [F, shard] float32 in place for the tokens that a sequence has already.
        This rank's ids are [start, start + count), in the first columns; the others stay.

        Of row f, sequence rows[f] of the step: position p of its context_lens[rows[f]] is in tokens
        [slots] int32 at block p // block_size of its part of the ragged table; from prompt_lens[f]
        on they are generated. A logit l of a token among them becomes l / r or, where negative,
        l · r, with r = repetition[f]; then that of a token generated n times loses
        frequency[f] · n + presence[f]. (As in transformers and vLLM.)

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
        """−inf into logits [F, shard] float32 of rows masked [M] int32 where masks [M, W] has a 0:
        token t is bit t % 32, the lowest first, of int32 number t // 32. Columns as above."""
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
        """Adds to bins [G, BINS] int64 how many of the first num_tokens logits of row
        rows[g] (int32 [G]; logits [F, shard] float32) have (key − low[g]) >> shifts[g] = the bin's
        number. Keys, and BINS, are those of `kernels.logits`; low, of which each is a key, and
        shifts are int64 [G]. Logits of −inf or NaN, and keys below low, are in no bin; nor is a row
        of negative shift."""
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
        """As `count_by_key`, but a logit counts ⌊2⁴⁰ · exp((logit − maxima[g]) · scales[g])⌋, both
        float32 [G], the same whichever column it is in: such integers add up alike in any order."""
        ...

    def pick_bins(
        self,
        bins: torch.Tensor,
        targets: torch.Tensor,
        low: torch.Tensor,
        shifts: torch.Tensor,
        above: torch.Tensor,
    ) -> None:
        """Of each row of bins [G, BINS] the last one that with those after it and above [G]
        has targets [G], or more; the first, where none has. low [G] moves to where it begins, above
        to the weight after it, and shifts [G] to what settles its next bits: to −1, where there are
        none or from low on is just the target. All int64. Rows of negative shift stay."""
        ...
