"""Background responses survive the deaths of all processes, one after another; and whether the
campaign of such deaths (tests/faults/background_campaign.py) would notice damage."""

from __future__ import annotations

import asyncio
import signal
from contextlib import aclosing
from typing import Any

import orjson
import pytest

from tests.faults.background_ledger import Ledger, text_of
from tests.faults.background_stack import (
    BackgroundStack,
    RefusedError,
    parsed,
    running_background_stack,
    until_gone,
)

TOKENS = 1500
BODY = {
    "input": "Once upon a time",
    "background": True,
    "temperature": 1.0,
    "seed": 11,
    "ignore_eos": True,
    "max_output_tokens": TOKENS,
}


async def read(
    stack: BackgroundStack, frontend: int, response: str, ledger: Ledger, count: int = 1 << 30
) -> None:
    """Reads so many more events, or all up to the end, from a frontend that may be starting."""
    wanted = len(ledger.events) + count
    while len(ledger.events) < wanted and not ledger.has_ended:
        after = len(ledger.events) - 1
        path = f"/v1/responses/{response}?stream=true"
        path += f"&starting_after={after}" if after >= 0 else ""
        connection = ledger.connection(after)
        try:
            async with aclosing(stack.events(frontend, "GET", path)) as events:
                async for event in events:
                    connection.take(event)
                    if len(ledger.events) == wanted:
                        return
        except RefusedError as error:
            if error.status not in (None, 503):
                raise
            await asyncio.sleep(0.02)
        else:
            connection.end()


async def test_a_response_survives_the_death_of_every_process() -> None:
    async with running_background_stack(frontends=3) as stack:
        calm = Ledger("calm", [])
        created = await stack.request(0, "POST", "/v1/responses", BODY)
        await read(stack, 0, created["id"], calm)

        ledger = Ledger("harmed", [])
        created = await stack.request(0, "POST", "/v1/responses", BODY)
        response = created["id"]
        await read(stack, 1, response, ledger, 20)
        for number, name in enumerate(
            ["frontend-0", "scheduler", "worker", "frontend-1", "frontend-2"]
        ):
            stack.end_parent(name)
            stack.start()
            reader = (number + 1) % 3
            await read(stack, reader, response, ledger, 20)
        fork = stack.signal("frontend-1", signal.SIGSTOP, 0)  # its parent process kills it
        await read(stack, 0, response, ledger, 20)
        await until_gone(fork)
        for name in stack.names:
            stack.end_parent(name)
        stack.start()
        await read(stack, 2, response, ledger)

        assert not ledger.violations
        final = await stack.request(2, "GET", f"/v1/responses/{response}")
        ledger.check_final(final, TOKENS)
        assert not ledger.violations
        assert final["usage"]["output_tokens"] == TOKENS
        assert text_of(final) == text_of(parsed(calm.events[-1])["response"])
        assert len(ledger.events) == len(calm.events)
        assert stack.count_logged("continuing a response")


def event(number: int, kind: str = "response.output_text.delta", **values: Any) -> bytes:
    data = {"type": kind, "sequence_number": number, **values}
    return b"event: %s\ndata: %s" % (kind.encode(), orjson.dumps(data))


RESPONSE = {
    "status": "completed",
    "error": None,
    "output": [{"content": [{"text": "ab"}]}],
    "usage": {"output_tokens": 2},
}
EVENTS = [
    event(0, delta="a"),
    event(1, delta="b"),
    event(2, "response.completed", response=RESPONSE),
]


def ledger_of(*connections: tuple[int, list[int]], changed: int | None = None) -> Ledger:
    """Each connection has the number after which it begins, and the numbers of its events."""
    ledger = Ledger("", [])
    for after, numbers in connections:
        connection = ledger.connection(after)
        for number in numbers:
            connection.take((number, EVENTS[number]))
        if numbers and numbers[-1] == 2:
            connection.end()
    if changed is not None:
        ledger.connection(changed - 1).take((changed, event(changed, delta="z")))
    return ledger


@pytest.mark.parametrize(
    ("connections", "changed", "problem"),
    [
        ([(-1, [0, 1, 2])], None, None),
        ([(-1, [0]), (0, [1]), (-1, [0, 1]), (1, [2])], None, None),
        ([(-1, [0, 2])], None, "event 2 instead of 1: lost"),
        ([(-1, [1, 2])], None, "event 1 instead of 0: lost"),
        ([(-1, [0]), (0, [0, 1, 2])], None, "event 0 instead of 1: doubled"),
        ([(-1, [0, 1, 1, 2])], None, "event 1 instead of 2: doubled"),
        ([(-1, [0, 1, 2])], 1, "event 1 changed"),
    ],
)
def test_damage_to_a_stream_is_noticed(
    connections: list[tuple[int, list[int]]], changed: int | None, problem: str | None
) -> None:
    violations = ledger_of(*connections, changed=changed).violations
    assert (problem in violations[0]) if problem else not violations


def test_a_stream_that_ends_early_is_noticed() -> None:
    ledger = ledger_of((-1, [0]))
    ledger.connection(0).end()
    assert ledger.violations == [": the stream ended before event 1"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, None),
        ({"output": [{"content": [{"text": "abc"}]}]}, "joined deltas"),
        ({"status": "failed"}, "status failed"),
        ({"usage": {"output_tokens": 3}}, "3 of 2 tokens"),
        ({"status": "incomplete", "usage": {"output_tokens": 1}}, "1 of 2 tokens"),
        ({"other": 1}, "another response"),
    ],
)
def test_a_wrong_final_response_is_noticed(change: dict[str, Any], problem: str | None) -> None:
    ledger = ledger_of((-1, [0, 1, 2]))
    ledger.check_final(RESPONSE | change, 2)
    text = "".join(ledger.violations)
    assert (problem in text) if problem else not text
