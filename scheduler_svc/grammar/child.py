"""A grammar's own process: compiles one grammar, then computes the masks of all its matchers.

The process is a fork of the grammar host, with xgrammar and the vocabulary loaded. It holds only a
socket to the scheduler, so that a grammar that harms it affects no other process. It ends when the
scheduler closes the socket or dies.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import time
from contextlib import suppress
from typing import BinaryIO

from scheduler_svc.grammar import wire
from scheduler_svc.grammar.compiler import (
    CompiledGrammar,
    Compilers,
    Matcher,
    compile_grammar,
    is_out_of_memory,
)
from scheduler_svc.grammar.confinement import confine
from scheduler_svc.grammar.errors import GrammarError
from scheduler_svc.grammar.wire import (
    COMPILE_CPU_S,
    MASK_CPU_S,
    MEMORY_BYTES,
    TOKEN_CPU_S,
    AnswerType,
)

_MAX_DESCRIPTORS = 16
# A process that takes more processor time for one mask lowers its priority by `_NICE`.
_HEAVY_CPU_S = 0.01
_NICE = 10
# Answers are sent together, until the first has waited this long or they have this many bytes.
_SEND_AFTER_S = 0.005
_SEND_BYTES = 64 << 10


def serve(scheduler: socket.socket, compilers: Compilers) -> None:
    """Serves until the scheduler closes the socket."""
    _close_others(scheduler.fileno())
    _set_limits()
    confine()
    requests = scheduler.makefile("rb")
    with suppress(BrokenPipeError, ConnectionResetError):
        try:
            if grammar := _compile(scheduler, requests, compilers):
                _compute_masks(scheduler, requests, grammar)
        except MemoryError:
            os._exit(wire.OUT_OF_MEMORY)
        except RuntimeError as error:
            if is_out_of_memory(error):
                os._exit(wire.OUT_OF_MEMORY)
            raise


def _close_others(descriptor: int) -> None:
    """Closes all of the host's descriptors but one. xgrammar's warnings are discarded, because a
    client could cause any number of them."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)
    os.closerange(3, descriptor)
    os.closerange(descriptor + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def _set_limits() -> None:
    gc.disable()  # there are no cycles, and a collection would touch, and copy, the host's memory
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # the first to be killed when memory runs out: it can be replaced
    with open("/proc/self/statm") as file:
        present = int(file.read().split()[0]) * resource.getpagesize()
    _limit(resource.RLIMIT_AS, present + MEMORY_BYTES)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_NOFILE, _MAX_DESCRIPTORS)
    _limit(resource.RLIMIT_NPROC, 0)  # no process or thread of its own; root is exempt


def _limit(what: int, value: int) -> None:
    _, hard = resource.getrlimit(what)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(what, (value, value))


def _limit_cpu(seconds: float) -> None:
    """Makes the kernel kill this process (SIGPROF) once it has used `seconds` more of processor
    time; 0 removes the limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _compile(
    scheduler: socket.socket, requests: BinaryIO, compilers: Compilers
) -> CompiledGrammar | None:
    if not (line := requests.readline()):
        return None
    kind, text = wire.read_compile_request(line)
    try:
        _limit_cpu(COMPILE_CPU_S)
        grammar = compile_grammar(compilers, kind, text)
    except GrammarError as error:
        scheduler.sendall(wire.answer(AnswerType.ERROR, error.reason.encode()))
        return None
    _limit_cpu(0)
    scheduler.sendall(wire.answer(AnswerType.DONE))
    return grammar


def _compute_masks(scheduler: socket.socket, requests: BinaryIO, grammar: CompiledGrammar) -> None:
    matchers: dict[int, Matcher] = {}
    while line := requests.readline():
        rows, closed, careful = wire.read_batch_request(line)
        for number in closed:
            matchers.pop(number, None)
        masks: dict[bytes, int] = {}  # of this batch, with the index of the first row of each
        answers, first_at, used_before = bytearray(), time.monotonic(), time.process_time()
        for index, row in enumerate(rows):
            _limit_cpu(MASK_CPU_S + TOKEN_CPU_S * len(row.tokens))
            answers += _answer(matchers, grammar, row, masks, index)
            now, used = time.monotonic(), time.process_time()
            if used - used_before > _HEAVY_CPU_S and not os.nice(0):
                os.nice(_NICE)
            used_before = used
            if careful or len(answers) > _SEND_BYTES or now - first_at > _SEND_AFTER_S:
                scheduler.sendall(answers)
                answers, first_at = bytearray(), now
        _limit_cpu(0)
        scheduler.sendall(answers)


def _answer(
    matchers: dict[int, Matcher],
    grammar: CompiledGrammar,
    row: wire.MaskRow,
    masks: dict[bytes, int],
    index: int,
) -> bytes:
    try:
        if row.end_token_ids is not None:
            matchers[row.matcher] = Matcher(grammar, row.end_token_ids)
        matcher = matchers[row.matcher]
        for token in row.tokens:
            matcher.accept(token)
        if matcher.finished:
            return wire.answer(AnswerType.DONE)
        mask = matcher.mask()
        if row.guess is not None and (draft := matcher.draft(row.guess, wire.MAX_DRAFTS)):
            tokens, following = zip(*draft, strict=True)
            return wire.draft_answer(wire.MaskedDraft(tokens, [mask, *following]))
    except GrammarError as error:
        return wire.answer(AnswerType.ERROR, error.reason.encode())
    if (same := masks.setdefault(mask, index)) != index:
        return wire.answer(AnswerType.SAME_MASK, wire.INDEX.pack(same))
    return wire.answer(AnswerType.MASK, mask)
