"""One loop for all interfaces: hostile messages are sent beside honest requests.

The honest ones must get what they get alone. In the end, nothing of any message may be left."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from google.protobuf.message import Message
from grpc import aio

from tests.fuzz.corpus import Case, load_cases
from tests.fuzz.tally import DEADLINE_S, Tally, send
from tests.fuzz.values import draw_cases

_ALONE_AFTER = 20  # cases

Shares = Sequence[tuple[str, Sequence[Message], float]]
"""Methods, each with valid messages and its share of the hostile ones."""


@dataclass(frozen=True)
class Interface:
    """A way into a service.

    Args:
        corpus: the folder of its cases, and its name.
        draw: makes that many cases from a seed, one after another, as many may be large.
        send: sends a case and records how it ended. Raises TimeoutError if it did not end.
        honest: sends a valid request; returns what must be equal each time.
        rest: waits until nothing is left of any case; records what died or logged a traceback.
        at_once: number of cases that are sent side by side. With one, the honest request waits for
            some of them: both share what is sent.
    """

    corpus: str
    draw: Callable[[int, int], Iterable[Case]]
    send: Callable[[Case, Tally], Awaitable[None]]
    honest: Callable[[], Awaitable[object]]
    rest: Callable[[Tally], Awaitable[None]]
    at_once: int = 8


async def fuzz(interface: Interface, count: int, seed: int) -> Tally:
    """Sends the corpus and `count` cases that are drawn from the seed."""
    tally = Tally()
    cases = chain(interface.draw(count, seed), load_cases(interface.corpus))
    expected = await interface.honest()
    size = _ALONE_AFTER if interface.at_once == 1 else None  # all
    for first in cases:
        left = chain([first], islice(cases, size))
        sending = asyncio.gather(
            *(_send_some(interface, left, tally) for _ in range(interface.at_once))
        )
        if interface.at_once == 1:
            await sending
        while True:
            if await interface.honest() != expected:
                tally.problem(
                    "an honest request got another answer", f"after {tally.counts.total()} answers"
                )
            if sending.done():
                break
        await sending
    await interface.rest(tally)
    return tally


async def _send_some(interface: Interface, left: Iterator[Case], tally: Tally) -> None:
    for case in left:
        try:
            await interface.send(case, tally)
        except TimeoutError:
            tally.problem(f"no answer in {DEADLINE_S:.0f} s", case)


def drawing(shares: Shares) -> Callable[[int, int], list[Case]]:
    """Draws cases like the examples of each method, as many as its share."""
    total = sum(share for *_, share in shares)

    def draw(count: int, seed: int) -> Iterable[Case]:
        numbers = [(name, like, round(count * share / total)) for name, like, share in shares]
        return draw_cases(numbers, seed)

    return draw


def calling(channel: aio.Channel, service: str) -> Callable[[Case, Tally], Awaitable[None]]:
    """Sends each message of a case in a call of its own to the case's method."""

    async def send_case(case: Case, tally: Tally) -> None:
        for message in case.messages:
            await send(channel, f"/{service}/{case.method}", message, tally, case)

    return send_case
