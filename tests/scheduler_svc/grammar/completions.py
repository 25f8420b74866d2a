"""Completions with a grammar that is in a process of its own, over the demo model's vocabulary."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Awaitable, Iterable
from collections.abc import Sequence as Seq
from typing import TypeVar

from scheduler_svc.grammar.grammar import GrammarUse, RemoteMatcher
from scheduler_svc.grammar.process import Outcome
from scheduler_svc.grammar.vocabulary import read_vocabulary
from shared.sampling_params import GrammarKind
from tests.scheduler_svc.grammar.host import DEMO
from tests.scheduler_svc.grammar.schema.walks import allowed

Result = TypeVar("Result")

REGEX = GrammarKind.REGEX
ENDS = frozenset({1535})
VOCABULARY = list(read_vocabulary(DEMO).tokens.values())
WORDS = r"([a-z]{1,9}[ .])+"


class Completion:
    """A completion and its matcher."""

    def __init__(self, compiled: GrammarUse, tokens: Iterable[int] = ()) -> None:
        self.tokens = array("i", [7, 8, *tokens])
        self.matcher = RemoteMatcher(compiled, self.tokens, 2)


def allowed_of(mask: Outcome) -> list[int]:
    assert isinstance(mask, bytes)
    return allowed(mask)


async def masks(matchers: Seq[RemoteMatcher]) -> list[Outcome]:
    return await matchers[0].grammar.masks(matchers)


async def go_on(
    completions: Seq[Completion], rng: random.Random, steps: int
) -> list[list[Outcome]]:
    """Picks allowed tokens at random, an end token only if there are no others; returns the
    outcomes that each completion had until its end."""
    found: list[list[Outcome]] = [[] for _ in completions]
    for _ in range(steps):
        open = [i for i, each in enumerate(completions) if each.tokens[-1] not in ENDS]
        if not open:
            break
        outcomes = await masks([completions[i].matcher for i in open])
        for i, mask in zip(open, outcomes, strict=True):
            found[i].append(mask)
            choice = [token for token in allowed_of(mask) if token not in ENDS]
            completions[i].tokens.append(rng.choice(choice or [*ENDS]))
    return found


async def soon(work: Awaitable[Result]) -> Result:
    return await asyncio.wait_for(work, 60)


async def transports_closed() -> None:
    """Gives the event loop the turns that it takes to close what was aborted."""
    for _ in range(5):
        await asyncio.sleep(0)
