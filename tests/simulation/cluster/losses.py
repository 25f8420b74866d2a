"""The losses that each completion was in, and whether they suffice to convict it.

A completion of which schedulers or workers die cannot be told from one that was there each time
when they died of something else. So a harmless completion may be convicted, but only by the rules
of `frontend.engines.deaths` and `scheduler_svc.suspects`: it made no progress during enough losses,
and was alone in the last of them or in enough of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, NamedTuple

from frontend.engines.deaths import MIN_DEATHS_BEFORE_ALONE, MIN_PROGRESS
from scheduler_svc.suspects import MIN_LOSSES, MIN_LOSSES_ALONE

if TYPE_CHECKING:
    from tests.simulation.cluster.engines import Owner


class _Loss(NamedTuple):
    tokens: int  # of the completion
    alone: bool


FRONTENDS = "frontends"  # remember the deaths of schedulers


class Losses:
    """All losses of a world, as it caused them."""

    def __init__(self) -> None:
        self._losses: dict[Owner, dict[object, list[_Loss]]] = defaultdict(dict)

    def add(self, memory: object, tokens: Mapping[Owner, int], running: Set[Owner]) -> None:
        """Adds a loss.

        Args:
            memory: what remembers it: `FRONTENDS`, or a scheduler.
            tokens: those of each completion that may count it.
            running: the completions that may be its reason.
        """
        for owner, count in tokens.items():
            loss = _Loss(count, alone=running <= {owner})
            self._losses[owner].setdefault(memory, []).append(loss)

    def convict(self, owner: Owner) -> bool:
        """Whether a completion that kills would have left the same trace."""
        return any(
            _convict_by_deaths(losses) if memory == FRONTENDS else _convict_by_workers(losses)
            for memory, losses in self._losses[owner].items()
        )


def _convict_by_deaths(losses: list[_Loss]) -> bool:
    count, tokens_before, to_blame = 0, 0, False
    for tokens, alone in losses:
        to_blame = alone and tokens == tokens_before and count >= MIN_DEATHS_BEFORE_ALONE
        count = 1 if tokens >= tokens_before + MIN_PROGRESS else count + 1
        tokens_before = tokens
    return to_blame


def _convict_by_workers(losses: list[_Loss]) -> bool:
    return len(losses) >= MIN_LOSSES and sum(each.alone for each in losses) >= MIN_LOSSES_ALONE
