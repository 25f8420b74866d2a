"""A model that can be computed by hand, for tests.

The state after a prefix is the state before its last token, times 31, plus that token, plus one.
The next token is the state modulo the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
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


def next_token(context: Seq[int]) -> int:
    """Depends on every token of the context and on their order."""
    return (states(context)[-1] if context else EMPTY) % VOCAB_SIZE


def completion(prompt: Seq[int], num_tokens: int) -> list[int]:
    """What an engine generates."""
    state = states(prompt)[-1] if prompt else EMPTY
    tokens = []
    for _ in range(num_tokens):
        tokens.append(state % VOCAB_SIZE)
        state = extend(state, tokens[-1])
    return tokens
