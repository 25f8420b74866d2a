"""A grammar's process: its masks, and what follows its death, its host's and its scheduler's."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import signal
import socket
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from scheduler_svc.grammar import process
from scheduler_svc.grammar.compiler import Matcher, compile_grammar, make_compilers
from scheduler_svc.grammar.errors import Death, ProcessDiedError, VocabularyError
from scheduler_svc.grammar.grammars import Grammars
from scheduler_svc.grammar.process import Outcome
from scheduler_svc.grammar.vocabulary import read_vocabulary
from scheduler_svc.grammar.wire import AnswerType, MaskedDraft, MaskRow, answer
from shared.sampling_params import GrammarKind
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
    transports_closed,
)
from tests.scheduler_svc.grammar.host import DEMO, TestHost, wait_dead

TAG = {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}
TEXTS: list[tuple[GrammarKind, str]] = [
    (REGEX, WORDS),
    (REGEX, r"[A-Z][a-z]{0,9}( (né|[0-9]+))?@(a|bc)+\."),
    (GrammarKind.JSON, ""),
    (GrammarKind.JSON_SCHEMA, '{"type": "array", "items": {"type": "integer"}, "minItems": 3}'),
    (GrammarKind.EBNF, 'root ::= term ("+" term)*\nterm ::= [0-9] | "(" root ")"'),
    (GrammarKind.STRUCTURAL_TAG, json.dumps({"type": "structural_tag", "format": TAG})),
]


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
    assert isinstance(first, MaskedDraft)
    assert isinstance(second, MaskedDraft)
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
    assert a in allowed_of(mask)


async def test_a_completion_that_is_complete_or_does_not_match_has_no_mask(
    grammars: Grammars,
) -> None:
    compiled = await grammars.compile(REGEX, "a?", ())
    a = VOCABULARY.index(b"a")
    completions = [Completion(compiled, tokens) for tokens in ([], [1535], [a])]
    mask, error, complete = await masks([each.matcher for each in completions])
    assert allowed_of(mask) == [a]
    assert str(error) == (
        "sampling.structured_output.regex: token 1535 at index 0 of the completion does not match"
    )
    assert complete is None


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


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as child:
        yield child
        child.kill()


MASK, SAME_MASK, ERROR = AnswerType.MASK, AnswerType.SAME_MASK, AnswerType.ERROR
LIMIT = bytes([Death.AT_LIMIT])


@pytest.mark.parametrize(
    ("sent", "death"),
    [
        (answer(SAME_MASK, bytes(4)), Death.CRASHED),
        (answer(SAME_MASK, b"\xff" * 4), Death.CRASHED),
        (answer(SAME_MASK), Death.CRASHED),
        (answer(ERROR, b"\xff"), Death.CRASHED),
        (answer(AnswerType.DRAFT), Death.CRASHED),
        (answer(AnswerType.DRAFT, b"\x02" + bytes(11)), Death.CRASHED),
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
            await made.masks([MaskRow(1, None, [])], [], outcomes, careful=False)
        assert caught.value.death is death
        assert not outcomes
        assert not made.is_usable
        assert child.wait(60) == -signal.SIGKILL
        await transports_closed()
