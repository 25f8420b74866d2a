"""Grammars in processes of their own: their masks, their limits, and what follows their deaths."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import warnings
from array import array
from collections.abc import AsyncIterator, Awaitable, Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import pytest

from scheduler_svc.core.sampling import GrammarKind
from scheduler_svc.grammar import process
from scheduler_svc.grammar.compiler import Matcher, compile_grammar, make_compilers
from scheduler_svc.grammar.errors import (
    Death,
    GrammarError,
    GrammarsBusyError,
    GuiltyGrammarError,
    ProcessDiedError,
    VocabularyError,
)
from scheduler_svc.grammar.grammar import Grammar, GrammarUse, RemoteMatcher
from scheduler_svc.grammar.grammars import MAX_TEXT_BYTES, Grammars
from scheduler_svc.grammar.process import Outcome
from scheduler_svc.grammar.vocabulary import read_vocabulary
from scheduler_svc.grammar.wire import Answer, Draft, Row, answer
from tests.scheduler_svc.grammar.attempts import ATTEMPTS, surroundings
from tests.scheduler_svc.grammar.host import DEMO, TestHost, is_running, wait_dead
from tests.waiting import wait_for

Result = TypeVar("Result")

REGEX = GrammarKind.REGEX
ENDS = frozenset({1535})
VOCABULARY = list(read_vocabulary(DEMO).tokens.values())
WORDS = r"([a-z]{1,9}[ .])+"
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
TAG = {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}
TEXTS: list[tuple[GrammarKind, str]] = [
    (REGEX, WORDS),
    (REGEX, r"[A-Z][a-z]{0,9}( (né|[0-9]+))?@(a|bc)+\."),
    (GrammarKind.JSON, ""),
    (GrammarKind.JSON_SCHEMA, '{"type": "array", "items": {"type": "integer"}, "minItems": 3}'),
    (GrammarKind.EBNF, 'root ::= term ("+" term)*\nterm ::= [0-9] | "(" root ")"'),
    (GrammarKind.STRUCTURAL_TAG, json.dumps({"type": "structural_tag", "format": TAG})),
]


@pytest.fixture(scope="module")
def _host() -> Iterator[TestHost]:
    with closing(TestHost()) as host:
        yield host


@pytest.fixture
async def host(_host: TestHost) -> AsyncIterator[TestHost]:
    yield _host
    wait_dead(*(child.pid for child in _host.children()))


@pytest.fixture
async def grammars(host: TestHost) -> AsyncIterator[Grammars]:
    grammars = Grammars(host.link)
    yield grammars
    grammars.close()


class Completion:
    """A completion and its matcher."""

    def __init__(self, compiled: GrammarUse, tokens: Iterable[int] = ()) -> None:
        self.tokens = array("i", [7, 8, *tokens])
        self.matcher = RemoteMatcher(compiled, self.tokens, 2)


def allowed(mask: Outcome) -> list[int]:
    assert isinstance(mask, bytes)
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits)]


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
            choice = [token for token in allowed(mask) if token not in ENDS]
            completions[i].tokens.append(rng.choice(choice or [*ENDS]))
    return found


async def soon(work: Awaitable[Result]) -> Result:
    return await asyncio.wait_for(work, 60)


async def transports_closed() -> None:
    """Gives the event loop the turns that it takes to close what was aborted."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_masks_are_those_that_a_matcher_in_this_process_gives(grammars: Grammars) -> None:
    compilers = make_compilers(read_vocabulary(DEMO), None)
    for kind, text in TEXTS:
        compiled = await grammars.compile(kind, text, ENDS)
        completions = [Completion(compiled) for _ in range(5)]
        found = await go_on(completions, random.Random(1), 12)
        local = compile_grammar(compilers, kind, text)
        for each, outcomes in zip(completions, found, strict=True):
            matcher = Matcher(local, ENDS)
            for i, (token, outcome) in enumerate(zip(each.tokens[2:], outcomes, strict=True)):
                assert outcome == matcher.mask()
                matcher.accept(token)
                resumed = Completion(compiled, each.tokens[2 : 2 + i])
                assert await masks([resumed.matcher]) == [outcome]


async def test_drafts_come_with_a_mask_for_each_position(grammars: Grammars) -> None:
    compiled = await grammars.compile(REGEX, "[ab]{3}cat[de]", ENDS)
    a, b, c = (VOCABULARY.index(letter) for letter in (b"a", b"b", b"c"))
    guessed, forced, plain = (Completion(compiled, tokens) for tokens in ([], [a, b, a], []))
    matchers = [each.matcher for each in (guessed, forced, plain)]
    first, second, third = await guessed.matcher.grammar.masks(matchers, [[a, b], [c], None])
    assert isinstance(first, Draft)
    assert isinstance(second, Draft)
    assert list(first.tokens) == [a, b]
    spelled = b"".join(VOCABULARY[token] for token in second.tokens)
    assert spelled == b"cat"
    assert third == first.masks[0]
    for each, draft in ((guessed, first), (forced, second)):
        for token, mask in zip(draft.tokens, draft.masks[1:], strict=True):
            each.tokens.append(token)
            assert await masks([each.matcher]) == [mask]


async def test_a_grammar_whose_process_died_drafts_nothing_more(grammars: Grammars) -> None:
    compiled = await grammars.compile(REGEX, "[ab]{3}cat[de]", ENDS)
    a = VOCABULARY.index(b"a")
    completion = Completion(compiled)
    assert compiled.grammar.process
    child = psutil.Process(compiled.grammar.process.pid)
    child.suspend()
    asking = asyncio.ensure_future(compiled.grammar.masks([completion.matcher], [[a]]))
    await asyncio.sleep(0)
    child.kill()
    (mask,) = await soon(asking)
    assert a in allowed(mask)


async def test_a_completion_that_is_complete_or_does_not_match_has_no_mask(
    grammars: Grammars,
) -> None:
    compiled = await grammars.compile(REGEX, "a?", ())
    a = VOCABULARY.index(b"a")
    completions = [Completion(compiled, tokens) for tokens in ([], [1535], [a])]
    mask, error, complete = await masks([each.matcher for each in completions])
    assert allowed(mask) == [a]
    assert str(error) == (
        "sampling.structured_output.regex: token 1535 at index 0 of the completion does not match"
    )
    assert complete is None


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
        assert {1535, 1534} & set(allowed((await masks([each.matcher]))[0])) <= {end}


async def test_a_grammar_with_an_error_is_not_cached(grammars: Grammars, host: TestHost) -> None:
    for _ in range(2):
        with pytest.raises(GrammarError, match=r"structured_output\.regex: .* is not closed"):
            await grammars.compile(REGEX, "(a", ENDS)
    wait_dead(*(child.pid for child in host.children()))


async def test_a_grammar_bomb_ends_alone_and_is_rejected_at_once_the_next_time(
    grammars: Grammars, host: TestHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts: list[str] = []
    start = Grammar.start

    def noted(grammar: Grammar, timeout_s: float) -> Any:
        starts.append(grammar.text)
        return start(grammar, timeout_s)

    monkeypatch.setattr(Grammar, "start", noted)
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


@pytest.mark.parametrize(
    ("number", "is_idle"),
    [
        (signal.SIGKILL, True),
        (signal.SIGKILL, False),
        (signal.SIGSEGV, False),
        (signal.SIGPROF, False),
    ],
)
async def test_a_process_that_dies_is_replaced(
    number: signal.Signals, is_idle: bool, grammars: Grammars, host: TestHost
) -> None:
    compiled = await grammars.compile(REGEX, WORDS, ENDS)
    completions = [Completion(compiled) for _ in range(4)]
    await go_on(completions, random.Random(5), 5)
    expected = await masks([Completion(compiled, c.tokens[2:]).matcher for c in completions])
    (child,) = host.children()
    if not is_idle:
        child.suspend()  # the work is on its way when it dies
    asking = asyncio.ensure_future(masks([each.matcher for each in completions]))
    if not is_idle:
        await asyncio.sleep(0)
    os.kill(child.pid, number)
    with suppress(ProcessLookupError):  # SIGKILL ends it even while it is stopped
        os.kill(child.pid, signal.SIGCONT)
    assert await soon(asking) == expected
    (successor,) = host.children()
    assert successor.pid != child.pid


async def test_a_completion_whose_process_always_dies_ends_alone(
    grammars: Grammars, host: TestHost
) -> None:
    """After many an `a` each token takes longer than the last; after `b` none does."""
    compiled = await grammars.compile(REGEX, "b+|a((((a*)*|a)*|a)*|a)*", ENDS)
    start = Completion(compiled)
    a, b = (VOCABULARY.index(letter) for letter in (b"a", b"b"))
    assert {a, b} <= set(allowed((await masks([start.matcher]))[0]))
    completions = [
        Completion(compiled, [b]),
        Completion(compiled, [a] * 200),
        Completion(compiled, [b, b]),
    ]
    first, guilty, last = await soon(masks([each.matcher for each in completions]))
    assert b in allowed(first)
    assert first == last
    assert isinstance(guilty, GrammarError)
    assert "its mask needs more than" in str(guilty)
    assert b in allowed((await masks([completions[0].matcher]))[0])


async def test_a_process_that_is_stopped_is_replaced(
    grammars: Grammars, host: TestHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = await grammars.compile(REGEX, WORDS, ENDS)
    one = Completion(compiled)
    await go_on([one], random.Random(7), 5)
    expected = await masks([one.matcher])
    (child,) = host.children()
    child.suspend()
    monkeypatch.setattr(process, "ANSWER_S", 0.5)
    asking = asyncio.ensure_future(masks([one.matcher]))
    await asyncio.to_thread(wait_dead, child.pid)
    monkeypatch.undo()
    assert await soon(asking) == expected


async def test_the_least_recently_used_idle_grammar_is_evicted(host: TestHost) -> None:
    grammars = Grammars(host.link, max_processes=2)
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


@pytest.mark.parametrize("limit", [{"max_processes": 1}, {"max_bytes": 1}])
async def test_a_grammar_waits_while_all_processes_are_in_use(
    limit: dict[str, int], host: TestHost
) -> None:
    grammars = Grammars(host.link, **limit)
    matcher = Completion(await grammars.compile(REGEX, "a", ENDS)).matcher
    grammars._timeout_s = 0.01
    with pytest.raises(GrammarsBusyError, match="other grammars"):
        await grammars.compile(REGEX, "b", ENDS)
    assert await masks([matcher])
    grammars._timeout_s = 30.0
    waiting = asyncio.ensure_future(grammars.compile(REGEX, "b", ENDS))
    (child,) = host.children()
    await asyncio.sleep(0)
    del matcher
    assert await soon(waiting)
    wait_dead(child.pid)
    grammars.close()


async def test_a_named_client_takes_at_most_half_of_the_processes(host: TestHost) -> None:
    grammars = Grammars(host.link, max_processes=4)
    kept = [await grammars.compile(REGEX, text, ENDS, "many") for text in "ab"]
    grammars._timeout_s = 0.01
    with pytest.raises(GrammarsBusyError):
        await grammars.compile(REGEX, "c", ENDS, "many")
    grammars._timeout_s = 30.0
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


async def test_a_request_cancelled_while_it_connects_leaves_no_socket_open(
    host: TestHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = asyncio.open_connection

    async def cancelled(**kwargs: Any) -> Any:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        return await connect(**kwargs)

    monkeypatch.setattr(asyncio, "open_connection", cancelled)
    gc.collect()
    with warnings.catch_warnings(record=True) as leaks:
        warnings.simplefilter("always")
        starting = asyncio.ensure_future(process.GrammarProcess.start(host.link))
        await asyncio.wait([starting])
        assert starting.cancelled()
        del starting
        await transports_closed()
        gc.collect()
    assert [str(each.message) for each in leaks] == []


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


async def test_grammar_processes_end_with_the_scheduler(host: TestHost) -> None:
    grammars = Grammars(host.link)
    compiled = await grammars.compile(REGEX, WORDS, ENDS)
    (child,) = host.children()
    process = compiled.grammar.process
    assert process is not None
    process._writer.transport.abort()  # as the kernel does when a process dies
    await asyncio.to_thread(wait_dead, child.pid)
    grammars.close()


async def test_a_host_that_dies_is_replaced_and_its_processes_continue() -> None:
    with closing(TestHost()) as host:
        grammars = Grammars(host.link)
        compiled = await grammars.compile(REGEX, WORDS, ENDS)
        one = Completion(compiled)
        await go_on([one], random.Random(8), 5)
        (child,) = host.children()
        os.kill(host.pid, signal.SIGKILL)
        expected = await masks([one.matcher])
        asking = asyncio.ensure_future(grammars.compile(REGEX, "b", ENDS))
        child.kill()
        replaying = asyncio.ensure_future(masks([one.matcher]))
        await asyncio.sleep(0)
        await asyncio.to_thread(host.restart)
        assert await soon(asking)
        assert await soon(replaying) == expected
        grammars.close()


async def test_a_host_that_does_not_load_in_time_is_killed(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    os.mkfifo(config)  # reading it takes for ever
    with closing(TestHost(tmp_path, load_s=0.1)) as host:
        grammars = Grammars(host.link)
        asking = asyncio.ensure_future(grammars.compile(REGEX, "a", ENDS))
        assert await asyncio.to_thread(host.wait) == -signal.SIGALRM
        config.unlink()
        host.restart()
        for missing in ("config.json", "tokenizer.json"):  # a model without a tokenizer says so
            with pytest.raises(VocabularyError, match=missing):
                await soon(asking)
            config.write_text('{"vocab_size": 10}')
            asking = asyncio.ensure_future(grammars.compile(REGEX, "a", ENDS))
        asking.cancel()
        grammars.close()


def test_the_scheduler_imports_neither_torch_nor_xgrammar() -> None:
    code = (
        "import sys, scheduler_svc.__main__;"
        "print([name for name in ('torch', 'xgrammar', 'tokenizers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as child:
        yield child
        child.kill()


MASK, SAME_MASK, ERROR = Answer.MASK, Answer.SAME_MASK, Answer.ERROR
LIMIT = bytes([Death.AT_LIMIT])


@pytest.mark.parametrize(
    ("sent", "death"),
    [
        (answer(SAME_MASK, bytes(4)), Death.CRASHED),
        (answer(SAME_MASK, b"\xff" * 4), Death.CRASHED),
        (answer(SAME_MASK), Death.CRASHED),
        (answer(ERROR, b"\xff"), Death.CRASHED),
        (answer(Answer.DRAFT), Death.CRASHED),
        (answer(Answer.DRAFT, b"\x02" + bytes(11)), Death.CRASHED),
        (bytes(4) + b"\x09", Death.CRASHED),
        (answer(MASK, bytes(9))[:-1] + LIMIT, Death.CRASHED),  # never a mask
        (answer(MASK, bytes(9))[:-2] + LIMIT, Death.AT_LIMIT),
        (LIMIT, Death.AT_LIMIT),
        (b"", Death.KILLED),
    ],
)
async def test_an_invalid_answer_ends_its_process(
    sent: bytes, death: Death, child: subprocess.Popen[bytes]
) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        reader, writer = await asyncio.open_connection(sock=ours)
        made = process.GrammarProcess(child.pid, os.pidfd_open(child.pid), reader, writer)
        theirs.sendall(sent)
        theirs.shutdown(socket.SHUT_WR)
        outcomes: list[Outcome] = []
        with pytest.raises(ProcessDiedError) as caught:
            await made.masks([Row(1, None, [])], [], outcomes, careful=False)
        assert caught.value.death is death
        assert not outcomes
        assert not made.is_usable
        assert child.wait(60) == -signal.SIGKILL
        await transports_closed()


async def test_waiting_grammars_are_not_examined_repeatedly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = 0
    real = Grammar.is_evictable.fget  # type: ignore[attr-defined]

    def is_evictable(self: Grammar) -> bool:
        nonlocal looks
        looks += 1
        return bool(real(self))

    async def nothing(*_: object) -> None: ...

    monkeypatch.setattr(Grammar, "is_evictable", property(is_evictable))
    monkeypatch.setattr(Grammars, "_load", nothing)
    monkeypatch.setattr(Grammar, "start", nothing)
    link: Any = None
    grammars = Grammars(link, max_processes=4)
    uses = [await grammars.compile(REGEX, f"use {i}", []) for i in range(4)]
    waiting = [asyncio.create_task(grammars.compile(REGEX, str(i), [])) for i in range(200)]
    for _ in range(5):
        await asyncio.sleep(0)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert looks <= 2 * 4 * len(waiting)
    assert len(uses) == len(grammars._grammars) == 4
