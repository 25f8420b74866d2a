"""Transcripts of what clients received, and their comparison with what they should have."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from nano_vllm_grpc.types import Chunk

# Log-probabilities recomputed in another batch differ in their last bits.
_LOGPROB_TOLERANCE = 1e-3


@dataclass
class Part:
    """One completion, its chunks joined."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[dict[int, float]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str = ""
    score: float = 0.0  # of beam search


@dataclass(frozen=True)
class Damage:
    """The difference between a transcript and the right one, in tokens."""

    lost: int = 0
    duplicated: int = 0
    wrong: int = 0
    differences: tuple[str, ...] = ()  # descriptions of all differences, not only in tokens

    def __add__(self, other: Damage) -> Damage:
        return Damage(
            self.lost + other.lost,
            self.duplicated + other.duplicated,
            self.wrong + other.wrong,
            self.differences + other.differences,
        )


class Transcript:
    """Joins chunks, and records those that do not fit."""

    def __init__(self) -> None:
        self.parts: dict[int, Part] = {}
        self.prompt_logprobs: list[dict[int, float]] = []
        self.prompt_tokens = 0
        self.completion_tokens: int | None = None  # as the server reports at the end
        self._damage = Damage()

    @property
    def num_tokens(self) -> int:
        return sum(len(part.token_ids) for part in self.parts.values())

    def add(self, chunk: Chunk) -> None:
        part = self.parts.setdefault(chunk.index, Part())
        missing = chunk.token_offset - len(part.token_ids)
        if missing:
            self._note(
                f"completion {chunk.index}: offset {chunk.token_offset} after "
                f"{len(part.token_ids)} tokens",
                lost=max(missing, 0),
                duplicated=max(-missing, 0),
            )
        if part.finish_reason is not None:
            self._note(f"completion {chunk.index}: a chunk after the last", duplicated=1)
        part.token_ids += chunk.token_ids
        part.text += chunk.text
        part.logprobs += chunk.logprobs
        part.finish_reason = chunk.finish_reason
        part.stop_reason = chunk.stop_reason
        part.score = chunk.score
        self.prompt_logprobs += chunk.prompt_logprobs
        if chunk.usage is not None:
            self.prompt_tokens = chunk.usage["prompt_tokens"]
            self.completion_tokens = chunk.usage["completion_tokens"]

    def compare(self, expected: Transcript, cut: bool = False) -> Damage:
        """Returns how this transcript differs from `expected`. With `cut`, it need only match the
        beginning, since the client cancelled the rest."""
        damage = self._damage
        if cut:
            for index, part in self.parts.items():
                damage += _compare_beginnings(index, part, expected.parts.get(index, Part()))
            return damage
        if self.parts.keys() != expected.parts.keys():
            damage += _said(f"completions {sorted(self.parts)}, not {sorted(expected.parts)}")
        for index, right in expected.parts.items():
            damage += _compare_parts(index, self.parts.get(index, Part()), right)
        if not _same_logprobs(self.prompt_logprobs, expected.prompt_logprobs):
            damage += _said("prompt_logprobs differ")
        for name in ("prompt_tokens", "completion_tokens"):
            ours, theirs = getattr(self, name), getattr(expected, name)
            if ours != theirs:
                damage += _said(f"usage.{name}: {ours}, not {theirs}")
        return damage

    def _note(self, difference: str, lost: int = 0, duplicated: int = 0) -> None:
        self._damage += Damage(lost, duplicated, 0, (difference,))


def _compare_beginnings(index: int, part: Part, right: Part) -> Damage:
    count = len(part.token_ids)
    damage = _compare_tokens(f"completion {index}", part.token_ids, right.token_ids[:count])
    if not right.text.startswith(part.text):
        damage += _said(f"completion {index}: text is {part.text!r}, not of {right.text!r}")
    return damage


def _compare_tokens(name: str, found: list[int], wanted: list[int]) -> Damage:
    wrong = [i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b]
    damage = Damage(max(len(wanted) - len(found), 0), max(len(found) - len(wanted), 0), len(wrong))
    if len(found) != len(wanted):
        damage += _said(f"{name}: {len(found)} tokens, not {len(wanted)}")
    if wrong:
        at = wrong[0]
        damage += _said(f"{name}: token {at} is {found[at]}, not {wanted[at]}")
    return damage


def _compare_parts(index: int, part: Part, right: Part) -> Damage:
    name = f"completion {index}"
    damage = _compare_tokens(name, part.token_ids, right.token_ids)
    for field_name in ("text", "finish_reason", "stop_reason"):
        ours, theirs = getattr(part, field_name), getattr(right, field_name)
        if ours != theirs:
            damage += _said(f"{name}: {field_name} is {ours!r}, not {theirs!r}")
    if not _same_logprobs(part.logprobs, right.logprobs):
        damage += _said(f"{name}: logprobs differ")
    if not math.isclose(part.score, right.score, abs_tol=_LOGPROB_TOLERANCE):
        damage += _said(f"{name}: score is {part.score}, not {right.score}")
    return damage


def _same_logprobs(found: list[dict[int, float]], wanted: list[dict[int, float]]) -> bool:
    return len(found) == len(wanted) and all(
        a.keys() == b.keys()
        and all(math.isclose(a[key], b[key], abs_tol=_LOGPROB_TOLERANCE) for key in a)
        for a, b in zip(found, wanted, strict=True)
    )


def _said(difference: str) -> Damage:
    return Damage(differences=(difference,))
