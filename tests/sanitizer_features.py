"""Checks and answers whatever a step asks for beyond a token per row."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from scheduler_svc.core.sampling import SamplingParams
from shared.pb import worker_pb2
from shared.sampling_params import BANNED
from tests.oracle import VOCAB_SIZE, completing, extend, logprobs, sample
from tests.step_columns import Ints, StepColumns
from worker_svc.step.arrays import StepArrays
from worker_svc.step.features import FeatureArrays, PromptTargets

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
    tokens: list[int] = field(default_factory=list)  # generated: these, and the last one

    def continue_with(self, token: int, place: int) -> None:
        """Replaces the token that was expected at `place` by the sampled one."""
        self.tokens[place - len(self.prompt)] = token
        if place < len(self.states):
            self.states[place] = extend(int(self.states[place - 1]), token)


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
        banned = {token for token, value in self.bias.items() if value < BANNED / 2}
        if self.mask is not None:
            bits = np.unpackbits(np.frombuffer(self.mask, np.uint8), bitorder="little")
            banned.update(np.flatnonzero(bits[:VOCAB_SIZE] == 0).tolist())
        return banned


class Features:
    """The features of a step, by row."""

    def __init__(self, step: StepColumns, decoded: StepArrays) -> None:
        self._step = step
        self.num_changed = 0  # tokens that the batch has changed
        self.sampling = _asked(decoded.features) if decoded.features else {}
        self.targets = _targets(decoded.prompt_targets) if decoded.prompt_targets else {}
        for row, (_, tokens) in self.targets.items():
            if not tokens:
                fail(f"row {row} has no targets")

    @property
    def rows_that_read_tokens(self) -> list[int]:
        """The rows whose penalties depend on the tokens of their context."""
        return [row for row, asked in self.sampling.items() if asked.numbers[3:] != (1, 0, 0)]

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

    def answer(self, states: Ints, *, by_batch: bool = False) -> worker_pb2.StepResponse:
        """Answers the step, given the states of all contexts, concatenated.

        Args:
            by_batch: whether the batch changes some tokens, as if two were nearly equally likely.
        """
        step = self._step
        last: list[int] = states[np.cumsum(step.attended_lens) - 1].tolist()
        change = by_batch and len(step.input_ids) % 2
        self.num_changed = sum(state % 3 == 0 for state in last) if change else 0
        tokens = [
            sample(
                state,
                seed + (change and state % 3 == 0),
                self.sampling[row].banned if row in self.sampling else (),
            )
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
            first = step.first_attended[row] + step.attended_lens[row] - step.query_lens[row]
            for i, target in enumerate(targets):
                found.append(logprobs(int(states[first + i]), target, k))
        return worker_pb2.StepResponse(
            step_id=step.request.step_id,
            token_ids=np.array(tokens, "<i4").tobytes(),
            logprob_ids=np.array([i for ids, _ in found for i in ids], "<i4").tobytes(),
            logprob_values=np.array([v for _, vs in found for v in vs], "<f4").tobytes(),
        )


def _asked(features: FeatureArrays) -> dict[int, Asked]:
    numbers = zip(*(column.tolist() for column in features.numbers.values()), strict=True)
    masks = dict(zip(features.masked.tolist(), features.masks, strict=True))
    asked = {}
    for i, (row, values) in enumerate(zip(features.rows.tolist(), numbers, strict=True)):
        of_row = slice(*features.bias_offsets[i : i + 2])
        bias: dict[int, float] = {}
        for token, value in zip(
            features.bias_ids[of_row].tolist(), features.bias_values[of_row].tolist(), strict=True
        ):
            bias[token] = bias.get(token, 0.0) + value
        mask = masks[i].tobytes() if i in masks else None
        lens = int(features.prompt_lens[i]), int(features.num_logprobs[i])
        asked[row] = Asked(values, *lens, bias, mask)
    return asked


def _targets(prompts: PromptTargets) -> dict[int, tuple[int | None, list[int]]]:
    parts = np.split(prompts.targets, prompts.offsets[1:-1])
    columns = zip(prompts.rows.tolist(), prompts.num_logprobs.tolist(), parts, strict=True)
    return {row: (k, tokens.tolist()) for row, k, tokens in columns}


def wanted(owner: Owner, context_len: int, masked: bool) -> Asked | None:
    """The features a row needs to sample the token after `context_len` others, or None if a
    temperature and a seed are enough. Written independently of the scheduler's code."""
    params = owner.params
    bias = dict(zip(params.bias_ids, params.bias_values, strict=True))
    if not masked and context_len - len(owner.prompt) < params.min_tokens:
        for token in params.eos_token_ids | params.stop_token_ids:
            bias[token] = _NEVER
    num_generated = context_len - len(owner.prompt)
    for token in completing(params.bad_words, list(owner.tokens[:num_generated])):
        bias[token] = bias.get(token, 0.0) + BANNED
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


def hidden_states(step: StepArrays) -> npt.NDArray[np.float32]:
    """Those of pooled rows, and then the scores. A token's hidden state is its id and its position.
    The logit of token t is then t * id + position."""
    found: list[float] = []
    scores: list[float] = []
    if (pooling := step.pooling) is not None:
        states = np.stack((step.input_ids, step.positions), axis=1).astype(np.float32)
        for place, row in enumerate(pooling.rows):
            first = step.first_tokens[row]
            tokens = states[first : first + step.query_lens[row]]
            yes, no = pooling.yes_ids[place], pooling.no_ids[place]
            if yes >= 0:
                logits = [each * tokens[-1][0] + tokens[-1][1] for each in (yes, no)]
                scores.append(logits[0] - logits[1])
            else:
                found += (tokens.sum(0) if pooling.sums[place] else tokens[-1]).tolist()
    return np.array(found + scores, "<f4")
