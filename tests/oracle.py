"""A model that can be computed by hand, for tests.

The state after a prefix is the state before its last token, times 31, plus that token, plus one.
The next token is the state plus the seed, modulo the vocabulary, or the first after it that may be
sampled. Log-probabilities depend on the state as well, and are those of no distribution.
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
    """The state after `token`, of one sequence or of many."""
    return (state * 31 + token + 1) % _MODULUS


def states(tokens: Iterable[int]) -> list[int]:
    """The state after each token of a sequence."""
    state, found = EMPTY, []
    for token in tokens:
        state = extend(state, token)
        found.append(state)
    return found


def sample(state: int, seed: int = 0, banned: Collection[int] = ()) -> int:
    """The token after a state. If all are banned, it is as if none was."""
    token = (state + seed) % VOCAB_SIZE
    allowed = (t % VOCAB_SIZE for t in range(token, token + VOCAB_SIZE))
    return next((t for t in allowed if t not in banned), token) if banned else token


def logprobs(state: int, token: int, k: int) -> tuple[list[int], list[float]]:
    """Token ids and values after a state: of `token`, then of the k that are called most likely."""
    ids = [token, *((state + i) % VOCAB_SIZE for i in range(k))]
    return ids, [-(1.0 + (state + id_) % 97) for id_ in ids]


def next_token(context: Seq[int]) -> int:
    """Depends on every token of the context and on their order."""
    return sample(states(context)[-1] if context else EMPTY)


def completion(
    prompt: Seq[int],
    num_tokens: int,
    seed: int = 0,
    min_tokens: int = 0,
    ends: Collection[int] = (),
) -> list[int]:
    """What an engine generates, were it not ended by any of `ends`, which are banned before
    `min_tokens`."""
    state = states(prompt)[-1] if prompt else EMPTY
    tokens: list[int] = []
    for _ in range(num_tokens):
        tokens.append(sample(state, seed, ends if len(tokens) < min_tokens else ()))
        state = extend(state, tokens[-1])
    return tokens
