"""Grammars in processes of their own: their limits, and who waits for whom."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from scheduler_svc.grammar import grammars as limits
from scheduler_svc.grammar.errors import (
    Death,
    GrammarError,
    GrammarsBusyError,
    GuiltyGrammarError,
    ProcessDiedError,
)
from scheduler_svc.grammar.grammar import RemoteGrammar
from scheduler_svc.grammar.grammars import MAX_TEXT_BYTES, Grammars
from shared.sampling_params import GrammarKind
from tests.scheduler_svc.grammar.attempts import ATTEMPTS, surroundings
from tests.scheduler_svc.grammar.completions import (
    ENDS,
    REGEX,
    VOCABULARY,
    WORDS,
    Completion,
    allowed_of,
    go_on,
    masks,
    soon,
)
from tests.scheduler_svc.grammar.host import TestHost, wait_dead
from tests.waiting import is_running, wait_for

BOMB = json.dumps(  # takes minutes
    {
        "type": "object",
        "properties": {f"p{i}": {"type": "integer"} for i in range(300)},
        "minProperties": 100,
        "maxProperties": 200,
    }
)
# Fills 64 MiB in a quarter of a second, a gigabyte in two.
HUNGRY = "(" + "|".join(f"[a-z]{{1,{i}}}x" for i in range(1, 800)) + ")*"


async def test_a_process_that_is_taken_over_can_do_nothing(
    grammars: Grammars, tmp_path: Path
) -> None:
    with surroundings(tmp_path) as given, pytest.raises(GrammarError) as caught:
        await grammars.compile(REGEX, ATTEMPTS + json.dumps(given), ENDS)
    outcomes = json.loads(caught.value.reason)
    assert outcomes.pop("start a thread") == "can't start new thread"
    assert {*outcomes.values()} == {"EPERM"}


async def test_a_process_has_no_open_file_of_its_host(grammars: Grammars, host: TestHost) -> None:
    await grammars.compile(REGEX, WORDS, ENDS)
    (child,) = host.children()
    directory = f"/proc/{child.pid}/fd/"
    opened = [os.readlink(directory + number) for number in os.listdir(directory)]
    (connection,) = (each for each in opened if each.startswith("socket:"))
    assert sorted(opened) == [os.devnull, os.devnull, os.devnull, connection]


async def test_a_text_that_is_too_long_is_rejected(grammars: Grammars) -> None:
    with pytest.raises(GrammarError, match=f"is longer than {MAX_TEXT_BYTES} bytes"):
        await grammars.compile(REGEX, "a" * (MAX_TEXT_BYTES + 1), ENDS)


async def test_a_grammar_is_compiled_once(grammars: Grammars, host: TestHost) -> None:
    both = await asyncio.gather(*(grammars.compile(REGEX, WORDS, {i}) for i in (1535, 1534)))
    again = await grammars.compile(REGEX, WORDS, ENDS)
    assert len(host.children()) == 1
    first, second = [Completion(compiled) for compiled in both]
    assert both[0].grammar is both[1].grammar is again.grammar
    for each, end in ((first, 1535), (second, 1534)):
        await go_on([each], random.Random(3), 6)
        assert {1535, 1534} & set(allowed_of((await masks([each.matcher]))[0])) <= {end}


async def test_a_grammar_with_an_error_is_not_cached(grammars: Grammars, host: TestHost) -> None:
    for _ in range(2):
        with pytest.raises(GrammarError, match=r"structured_output\.regex: .* is not closed"):
            await grammars.compile(REGEX, "(a", ENDS)
    wait_dead(*(child.pid for child in host.children()))


async def test_a_grammar_bomb_ends_alone_and_is_rejected_at_once_the_next_time(
    grammars: Grammars, host: TestHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[str] = []
    start = RemoteGrammar.start

    def noted(grammar: RemoteGrammar, timeout_s: float) -> Any:
        starts.append(grammar.text)
        return start(grammar, timeout_s)

    monkeypatch.setattr(RemoteGrammar, "start", noted)
    bombs = [
        asyncio.ensure_future(
            grammars.compile(GrammarKind.JSON_SCHEMA, BOMB.replace("p1", f"q{i}"), ENDS, "bomber")
        )
        for i in range(4)
    ]
    # A task, so that it begins after theirs.
    honest = await asyncio.create_task(grammars.compile(REGEX, WORDS, ENDS, "honest"))
    assert WORDS in starts[:4]  # it did not wait for all of them
    for bomb in bombs:
        with pytest.raises(GuiltyGrammarError, match=r"needs more than .* s of processor time or"):
            await bomb
    assert (await go_on([Completion(honest)], random.Random(4), 3))[0]
    assert len(host.children()) == 1
    with pytest.raises(GuiltyGrammarError, match="needs more than"):
        await grammars.compile(GrammarKind.JSON_SCHEMA, BOMB.replace("p1", "q0"), ENDS)
    assert len(host.children()) == 1


async def test_a_grammar_over_its_memory_ends_and_its_neighbours_continue() -> None:
    """With an hour of processor time."""
    with closing(TestHost(compile_cpu_s=3600)) as host:
        grammars = Grammars(host.link)
        honest = Completion(await grammars.compile(REGEX, WORDS, ENDS))
        expected = await masks([honest.matcher])
        (neighbour,) = host.children()
        with pytest.raises(GuiltyGrammarError, match="or 512 MiB of memory") as caught:
            await grammars.compile(REGEX, HUNGRY, ENDS)
        assert isinstance(caught.value.__cause__, ProcessDiedError)
        assert caught.value.__cause__.death is Death.AT_LIMIT
        assert await masks([honest.matcher]) == expected
        assert [each.pid for each in host.children()] == [neighbour.pid]
        grammars.close()


async def test_a_completion_whose_process_always_dies_ends_alone(
    grammars: Grammars, host: TestHost
) -> None:
    """After many an `a` each token takes longer than the last; after `b` none does."""
    compiled = await grammars.compile(REGEX, "b+|a((((a*)*|a)*|a)*|a)*", ENDS)
    start = Completion(compiled)
    a, b = (VOCABULARY.index(letter) for letter in (b"a", b"b"))
    assert {a, b} <= set(allowed_of((await masks([start.matcher]))[0]))
    completions = [
        Completion(compiled, [b]),
        Completion(compiled, [a] * 200),
        Completion(compiled, [b, b]),
    ]
    first, guilty, last = await soon(masks([each.matcher for each in completions]))
    assert b in allowed_of(first)
    assert first == last
    assert isinstance(guilty, GrammarError)
    assert "its mask needs more than" in str(guilty)
    assert b in allowed_of((await masks([completions[0].matcher]))[0])


async def test_the_least_recently_used_idle_grammar_is_evicted(
    host: TestHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "_MAX_PROCESSES", 2)
    grammars = Grammars(host.link)
    await grammars.compile(REGEX, "a", ENDS)
    await grammars.compile(REGEX, "b", ENDS)
    first, second = host.children()
    used = await grammars.compile(REGEX, "a", ENDS)
    await grammars.compile(REGEX, "c", ENDS)
    wait_dead(second.pid)
    assert is_running(first.pid)
    assert (await masks([Completion(used).matcher]))[0]
    assert len(host.children()) == 2
    grammars.close()


@pytest.mark.parametrize("limit", ["_MAX_PROCESSES", "_MAX_BYTES"])
async def test_a_grammar_waits_while_all_processes_are_in_use(
    limit: str, host: TestHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, limit, 1)
    grammars = Grammars(host.link)
    matcher = Completion(await grammars.compile(REGEX, "a", ENDS)).matcher
    monkeypatch.setattr(limits, "_WAIT_S", 0.01)
    with pytest.raises(GrammarsBusyError, match="other grammars"):
        await grammars.compile(REGEX, "b", ENDS)
    assert await masks([matcher])
    monkeypatch.setattr(limits, "_WAIT_S", 30.0)
    waiting = asyncio.ensure_future(grammars.compile(REGEX, "b", ENDS))
    (child,) = host.children()
    await asyncio.sleep(0)
    del matcher
    assert await soon(waiting)
    wait_dead(child.pid)
    grammars.close()


async def test_a_named_client_takes_at_most_half_of_the_processes(
    host: TestHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "_MAX_PROCESSES", 4)
    grammars = Grammars(host.link)
    kept = [await grammars.compile(REGEX, text, ENDS, "many") for text in "ab"]
    monkeypatch.setattr(limits, "_WAIT_S", 0.01)
    with pytest.raises(GrammarsBusyError):
        await grammars.compile(REGEX, "c", ENDS, "many")
    monkeypatch.setattr(limits, "_WAIT_S", 30.0)
    kept.append(await grammars.compile(REGEX, "d", ENDS, "one"))
    kept.append(await grammars.compile(REGEX, "a", ENDS, "many"))  # it is there already
    grammars.close()


async def test_a_cancelled_request_does_not_cancel_a_shared_compilation(grammars: Grammars) -> None:
    first = asyncio.ensure_future(grammars.compile(GrammarKind.JSON, "", ENDS))
    second = asyncio.ensure_future(grammars.compile(GrammarKind.JSON, "", ENDS))
    await asyncio.sleep(0)
    first.cancel()
    assert (await soon(second)).grammar.kind is GrammarKind.JSON
    assert first.cancelled()


async def test_a_compilation_ends_when_nobody_waits_for_it(
    grammars: Grammars, host: TestHost
) -> None:
    await grammars.compile(REGEX, WORDS, ENDS)
    bomb = asyncio.ensure_future(grammars.compile(GrammarKind.JSON_SCHEMA, BOMB, ENDS))
    await asyncio.to_thread(wait_for, lambda: len(host.children()) == 2, "its process")
    _, child = host.children()
    bomb.cancel()
    await asyncio.to_thread(wait_dead, child.pid)
    with pytest.raises(asyncio.CancelledError):
        await bomb


def test_the_scheduler_imports_neither_torch_nor_xgrammar() -> None:
    code = (
        "import sys, scheduler_svc.__main__;"
        "print([name for name in ('torch', 'xgrammar', 'tokenizers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


async def test_waiting_grammars_are_not_examined_repeatedly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = 0
    real = RemoteGrammar.is_evictable.fget  # type: ignore[attr-defined]

    def is_evictable(self: RemoteGrammar) -> bool:
        nonlocal looks
        looks += 1
        return bool(real(self))

    async def nothing(*_: object) -> None: ...

    monkeypatch.setattr(RemoteGrammar, "is_evictable", property(is_evictable))
    monkeypatch.setattr(Grammars, "_load", nothing)
    monkeypatch.setattr(RemoteGrammar, "start", nothing)
    monkeypatch.setattr(limits, "_MAX_PROCESSES", 4)
    link: Any = None
    grammars = Grammars(link)
    uses = [await grammars.compile(REGEX, f"use {i}", []) for i in range(4)]
    waiting = [asyncio.create_task(grammars.compile(REGEX, str(i), [])) for i in range(200)]
    for _ in range(5):
        await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert looks <= 2 * 4 * len(waiting)
    assert len(uses) == len(grammars._grammars) == 4
