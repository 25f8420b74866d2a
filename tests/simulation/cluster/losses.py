"""The losses that each completion was in, and whether they suffice to convict it.

A completion of which schedulers or workers die cannot be told from one that was there each time
when they died of something else. So a harmless completion may be convicted, but only by the rule of
`shared.suspects`: it made no progress during enough losses, and was alone in enough of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, NamedTuple

from frontend.engines.ledger import MIN_PROGRESS
from shared.suspects import MIN_LOSSES, MIN_LOSSES_ALONE

if TYPE_CHECKING:
    from tests.simulation.cluster.engines import Owner


class _Loss(NamedTuple):
    tokens: int  # of the completion
    alone: bool


class Losses:
    """All losses of a world, as it caused them."""

    def __init__(self) -> None:
        self._losses: dict[Owner, dict[object, list[_Loss]]] = defaultdict(dict)

    def add(self, memory: object, tokens: Mapping[Owner, int], running: Set[Owner]) -> None:
        """Adds a loss.

        Args:
            memory: what remembers it: the frontends, or a scheduler.
            tokens: those of each completion that may count it.
            running: the completions that may be its reason.
        """
        for owner, count in tokens.items():
            loss = _Loss(count, alone=running <= {owner})
            self._losses[owner].setdefault(memory, []).append(loss)

    def convict(self, owner: Owner) -> bool:
        """Whether a completion that kills would have left the same trace."""
        return any(_convict(losses) for losses in self._losses[owner].values())


def _convict(losses: list[_Loss]) -> bool:
    count = count_alone = tokens_before = 0
    for tokens, alone in losses:
        if tokens >= tokens_before + MIN_PROGRESS:
            count = count_alone = 0
        count += 1
        count_alone += alone and tokens == tokens_before
        tokens_before = tokens
    return count >= MIN_LOSSES and count_alone >= MIN_LOSSES_ALONE
