"""A model for tests that can be computed by hand.

The state after a prefix is the state before its last token, times 31, plus that token, plus one.
The next token is the state plus the seed, modulo the vocabulary size, or the first after it that
may be sampled. Log-probabilities depend on the state too, but belong to no distribution.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Seq
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

VOCAB_SIZE = 1000
EMPTY = 1  # the state before the first token

_MODULUS = 2**31 - 1
State = TypeVar("State", int, NDArray[np.int64])


def extend(state: State, token: State) -> State:
    """The state after `token`, for one sequence or for many."""
    return (state * 31 + token + 1) % _MODULUS


def states(tokens: Iterable[int]) -> list[int]:
    """The state after each token of a sequence."""
    state, found = EMPTY, []
    for token in tokens:
        state = extend(state, token)
        found.append(state)
    return found


def sample(state: int, seed: int = 0, banned: Collection[int] = ()) -> int:
    """The token sampled in a state. Banning every token is the same as banning none."""
    token = (state + seed) % VOCAB_SIZE
    allowed = (t % VOCAB_SIZE for t in range(token, token + VOCAB_SIZE))
    return next((t for t in allowed if t not in banned), token) if banned else token


def draft(state: int, seed: int = 0) -> int:
    """The guess of a draft model at the token sampled in a state, which is wrong in every third."""
    return (sample(state, seed) + (state % 3 == 0)) % VOCAB_SIZE


def logprobs(state: int, token: int, k: int) -> tuple[list[int], list[float]]:
    """Token ids and values in a state: those of `token`, then of the k deemed most likely."""
    ids = [token, *((state + i) % VOCAB_SIZE for i in range(k))]
    return ids, [-(1.0 + (state + id_) % 97) for id_ in ids]


def next_token(context: Seq[int]) -> int:
    """The token after a context, which depends on all of its tokens and their order."""
    return sample(states(context)[-1] if context else EMPTY)


def completing(bad_words: Collection[tuple[int, ...]], generated: list[int]) -> set[int]:
    """The tokens that would complete a bad word."""
    return {
        last
        for *before, last in bad_words
        if len(before) <= len(generated) and generated[len(generated) - len(before) :] == before
    }


def completion(
    prompt: Seq[int],
    num_tokens: int,
    seed: int = 0,
    min_tokens: int = 0,
    ends: Collection[int] = (),
    bad_words: Collection[tuple[int, ...]] = (),
) -> list[int]:
    """The tokens that an engine generates if none of `ends`, which are banned before `min_tokens`,
    stops it."""
    state = states(prompt)[-1] if prompt else EMPTY
    tokens: list[int] = []
    for _ in range(num_tokens):
        banned = {*ends} if len(tokens) < min_tokens else set()
        banned |= completing(bad_words, tokens)
        tokens.append(sample(state, seed, banned))
        state = extend(state, tokens[-1])
    return tokens
