"""Checks and answers whatever a step asks for beyond a token per row."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.sampling import SamplingParams
from shared.pb import worker_pb2
from tests.oracle import VOCAB_SIZE, logprobs, sample
from tests.step_columns import Ints, StepColumns, ints

_MASK_WORDS = -(-VOCAB_SIZE // 32)
_NEVER = -math.inf


class SanitizerError(AssertionError):
    """A step that must never reach a worker."""


@dataclass(frozen=True)
class Owner:
    """The sequence behind a row, which the protocol does not mention."""

    name: str
    number: int  # unique among all sequences, from 1 on
    salt: int  # only sequences of the same salt may share blocks
    params: SamplingParams
    prompt: Seq[int]
    states: Ints  # after each token it may ever compute; its last one needs no step


@dataclass(frozen=True)
class Asked:
    """The features of one row that samples."""

    numbers: tuple[float, ...]  # in the order of the columns
    num_prompt_tokens: int
    num_logprobs: int
    bias: dict[int, float]
    mask: bytes | None

    @property
    def banned(self) -> set[int]:
        banned = {token for token, value in self.bias.items() if value == _NEVER}
        if self.mask is not None:
            bits = np.unpackbits(np.frombuffer(self.mask, np.uint8), bitorder="little")
            banned.update(np.flatnonzero(bits[:VOCAB_SIZE] == 0).tolist())
        return banned


class Features:
    """The features of a step, by row."""

    def __init__(self, step: StepColumns) -> None:
        """Reads the columns.

        Raises:
            SanitizerError: two columns contradict each other, or a value is out of range.
        """
        self._step = step
        self.sampling = self._read_sampling(step.request.features)
        self.targets = self._read_targets(step.request.prompt_logprobs)

    def check_owners(self, owners: Seq[Owner]) -> None:
        """Each row must ask for exactly what its sequence wants."""
        step = self._step
        for row, owner in enumerate(owners):
            context_len = int(step.context_lens[row])
            found = self.sampling.get(row)
            masked = found is not None and found.mask is not None
            if masked and owner.params.grammar is None:
                fail(f"row {row} has a mask")
            expected = wanted(owner, context_len, masked) if step.samples[row] else None
            if found is None or expected is None:
                if found is not expected:
                    fail(f"features of row {row} are {found}, expected {expected}")
            elif (found.numbers, found.num_prompt_tokens, found.num_logprobs, found.bias) != (
                expected.numbers,
                expected.num_prompt_tokens,
                expected.num_logprobs,
                expected.bias,
            ):
                fail(f"features of row {row} are {found}, expected {expected}")
            if row in self.targets:
                start, last = context_len - int(step.query_lens[row]), len(owner.prompt) - 1
                tokens = list(owner.prompt[start + 1 : min(context_len, last) + 1])
                if self.targets[row] != (owner.params.prompt_logprobs, tokens):
                    fail(
                        f"row {row} scores {self.targets[row]}, its prompt continues with {tokens}"
                    )

    def answer(self, states: Ints) -> worker_pb2.StepResponse:
        """Answers the step, given the states of all contexts, concatenated."""
        step = self._step
        last: list[int] = states[np.cumsum(step.context_lens) - 1].tolist()
        tokens = [
            sample(state, seed, self.sampling[row].banned if row in self.sampling else ())
            if samples
            else -1
            for row, (state, seed, samples) in enumerate(
                zip(last, step.seeds.tolist(), step.samples.tolist(), strict=True)
            )
        ]
        found = [
            logprobs(last[row], tokens[row], asked.num_logprobs)
            for row, asked in self.sampling.items()
            if asked.num_logprobs >= 0
        ]
        for row, (k, targets) in self.targets.items():
            first = step.first_attended[row] + step.context_lens[row] - step.query_lens[row]
            for i, target in enumerate(targets):
                found.append(logprobs(int(states[first + i]), target, k))
        return worker_pb2.StepResponse(
            step_id=step.request.step_id,
            token_ids=np.array(tokens, "<i4").tobytes(),
            logprob_ids=np.array([i for ids, _ in found for i in ids], "<i4").tobytes(),
            logprob_values=np.array([v for _, vs in found for v in vs], "<f4").tobytes(),
        )

    def _read_sampling(self, features: worker_pb2.SamplingFeatures) -> dict[int, Asked]:
        rows = self._rows(features.rows, "features")
        if self._step.request.HasField("features") != bool(rows):
            fail("features without rows")
        if not all(self._step.samples[rows]):
            fail("features of a row that samples nothing")
        numbers = [
            _column(column, dtype, len(rows), name).tolist()
            for column, dtype, name in (
                (features.top_k, "<i4", "top_k"),
                (features.top_p, "<f4", "top_p"),
                (features.min_p, "<f4", "min_p"),
                (features.repetition_penalties, "<f4", "repetition_penalties"),
                (features.presence_penalties, "<f4", "presence_penalties"),
                (features.frequency_penalties, "<f4", "frequency_penalties"),
            )
        ]
        prompt_lens = _column(features.prompt_lens, "<i4", len(rows), "prompt_lens").tolist()
        nums = _column(features.num_logprobs, "<i4", len(rows), "num_logprobs").tolist()
        biases = self._read_biases(features, len(rows))
        masks = self._read_masks(features, len(rows))
        asked = {}
        for i, row in enumerate(rows):
            top_k, top_p, min_p, repetition, *others = values = tuple(c[i] for c in numbers)
            if not (top_k >= 0 and 0 < top_p <= 1 and 0 <= min_p <= 1):
                fail(f"filters of row {row}")
            if not (repetition > 0 and all(map(math.isfinite, (repetition, *others)))):
                fail(f"penalties of row {row}")
            if not 0 < prompt_lens[i] <= self._step.context_lens[row]:
                fail(f"prompt_lens of row {row}")
            if not -1 <= nums[i] <= VOCAB_SIZE:
                fail(f"num_logprobs of row {row}")
            asked[row] = Asked(values, prompt_lens[i], nums[i], biases[i], masks.get(i))
        return asked

    def _read_biases(
        self, features: worker_pb2.SamplingFeatures, num_rows: int
    ) -> list[dict[int, float]]:
        ids = ints(features.bias_ids).tolist()
        values = _column(features.bias_values, "<f4", len(ids), "bias_values").tolist()
        offsets = _offsets(features.bias_offsets, num_rows, len(ids), "bias_offsets")
        if not all(0 <= token < VOCAB_SIZE for token in ids):
            fail("a bias outside the vocabulary")
        if not all(value < math.inf for value in values):
            fail("a bias that is not a number or infinite")
        biases: list[dict[int, float]] = []
        for start, end in itertools.pairwise(offsets):
            bias: dict[int, float] = {}
            for token, value in zip(ids[start:end], values[start:end], strict=True):
                bias[token] = bias.get(token, 0.0) + value
            biases.append(bias)
        return biases

    def _read_masks(self, features: worker_pb2.SamplingFeatures, num_rows: int) -> dict[int, bytes]:
        masked = ints(features.masked).tolist()
        if masked != sorted(set(masked)) or not all(0 <= i < num_rows for i in masked):
            fail("masked rows are not ascending, or do not exist")
        size = 4 * _MASK_WORDS
        if len(features.masks) != len(masked) * size:
            fail("masks of another size")
        return {i: features.masks[n * size : (n + 1) * size] for n, i in enumerate(masked)}

    def _read_targets(
        self, prompts: worker_pb2.PromptLogprobs
    ) -> dict[int, tuple[int | None, list[int]]]:
        rows = self._rows(prompts.rows, "prompt_logprobs")
        if self._step.request.HasField("prompt_logprobs") != bool(rows):
            fail("prompt_logprobs without rows")
        nums = _column(prompts.num_logprobs, "<i4", len(rows), "num_logprobs").tolist()
        tokens = ints(prompts.targets).tolist()
        offsets = _offsets(prompts.target_offsets, len(rows), len(tokens), "target_offsets")
        if not all(0 <= token < VOCAB_SIZE for token in tokens):
            fail("a target outside the vocabulary")
        targets: dict[int, tuple[int | None, list[int]]] = {}
        for i, row in enumerate(rows):
            targets[row] = (nums[i], tokens[offsets[i] : offsets[i + 1]])
            if not 0 < len(targets[row][1]) <= self._step.query_lens[row]:
                fail(f"row {row} has {len(targets[row][1])} targets")
            if not 0 <= nums[i] <= VOCAB_SIZE:
                fail(f"num_logprobs of row {row}")
        return targets

    def _rows(self, column: bytes, name: str) -> list[int]:
        rows: list[int] = ints(column).tolist()
        num_rows = len(self._step.query_lens)
        if rows != sorted(set(rows)) or not all(0 <= row < num_rows for row in rows):
            fail(f"rows of {name} are not ascending, or do not exist")
        return rows


def wanted(owner: Owner, context_len: int, masked: bool) -> Asked | None:
    """The features a row needs to sample the token after `context_len` others, or None if a
    temperature and a seed are enough. Written independently of the scheduler's code."""
    params = owner.params
    bias = dict(zip(params.bias_ids, params.bias_values, strict=True))
    if not masked and context_len - len(owner.prompt) < params.min_tokens:
        for token in params.eos_token_ids | params.stop_token_ids:
            bias[token] = _NEVER
    numbers = (
        params.top_k,
        params.top_p,
        params.min_p,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
    )
    plain = not bias and params.logprobs is None and numbers == (0, 1.0, 0.0, 1.0, 0.0, 0.0)
    if plain and not masked:
        return None
    rounded = tuple(float(np.float32(number)) for number in numbers)
    num_logprobs = -1 if params.logprobs is None else params.logprobs
    return Asked(rounded, len(owner.prompt), num_logprobs, bias, None)


def fail(message: str) -> NoReturn:
    raise SanitizerError(message)


def _column(column: bytes, dtype: str, length: int, name: str) -> NDArray[np.generic]:
    found: NDArray[np.generic] = np.frombuffer(column, dtype)
    if len(found) != length:
        fail(f"{name}: {len(found)} entries for {length}")
    return found


def _offsets(column: bytes, num_rows: int, length: int, name: str) -> list[int]:
    offsets: list[int] = ints(column).tolist()
    if num_rows == 0 and not offsets:
        return [0]
    if len(offsets) != num_rows + 1 or offsets[0] != 0 or offsets[-1] != length:
        fail(f"{name}: {offsets} for {num_rows} rows and {length} entries")
    if offsets != sorted(offsets):
        fail(f"{name} are not ascending")
    return offsets
