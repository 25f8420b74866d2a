"""Structured output: supplies sequences with a mask for each of their tokens.

A grammar is compiled before its sequence is queued. After each token the sequence is paused while
the grammar's process computes the mask of the next token. Steps continue without the sequence.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Seq
from functools import partial
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np
import structlog

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import FinishCause, Sequence, SequenceKey, Status
from scheduler_svc.core.step import End, Output
from scheduler_svc.grammar.errors import GrammarError, GrammarsBusyError
from scheduler_svc.grammar.grammar import GrammarUse, RemoteGrammar, RemoteMatcher
from scheduler_svc.grammar.grammars import Grammars
from scheduler_svc.grammar.wire import MaskedDraft
from scheduler_svc.metrics import EngineMetrics
from shared.sampling_params import GrammarKind

log = structlog.get_logger(__name__)

# While all slots for compiling are taken or all grammars are in use, for an unknown time.
_RETRY_AFTER_S = 5.0


class ConstrainedEngine(Protocol):
    """The part of the engine that is needed here."""

    scheduler: Scheduler
    metrics: EngineMetrics
    clock: Callable[[], float]

    def queue(self, seq: Sequence, n: int) -> None:
        """Queues a sequence and the other completions of its prompt, or emits its end."""

    def refuse(self, seq: Sequence, end: End) -> None:
        """Emits the end of a sequence that was not accepted."""

    def emit(self, outputs: list[Output]) -> None:
        """Sends outputs to the frontends."""

    def wake(self) -> None:
        """Makes the engine look for work to schedule."""


class Constraints:
    """Supplies the masks of constrained sequences. Use it only from the engine's event loop."""

    def __init__(self, grammars: Grammars, engine: ConstrainedEngine) -> None:
        self._grammars = grammars
        self._engine = engine
        self._beginning: dict[SequenceKey, asyncio.Task[None]] = {}
        self._beginning_of: Counter[str | int] = Counter()  # by `_sender`
        self._masking: set[asyncio.Task[None]] = set()
        self._matchers: WeakKeyDictionary[Sequence, RemoteMatcher] = WeakKeyDictionary()

    def begin(self, seq: Sequence, n: int) -> None:
        """Queues a sequence once its grammar is compiled, or emits its end if that fails."""
        if end := self._refusal(seq, n):
            self._engine.refuse(seq, end)
            return
        task = asyncio.create_task(self._guarded(partial(self._begin, seq, n), [seq]))
        self._beginning[seq.key] = task
        self._beginning_of[_sender(seq)] += 1
        task.add_done_callback(lambda _: self._begun(seq))

    def abort(self, key: SequenceKey) -> None:
        """Drops a sequence if its grammar is still being compiled."""
        if task := self._beginning.get(key):
            task.cancel()

    def abort_connection(self, connection: int, limit: int | None) -> bool:
        """Drops up to `limit` such sequences of a connection. Returns whether there may be more."""
        tasks = [
            task
            for key, task in self._beginning.items()
            if key.connection == connection and not task.cancelling()
        ]
        for task in tasks[:limit]:
            task.cancel()
        return limit is not None and len(tasks) > limit

    def advance(self, outputs: Seq[Output]) -> None:
        """Starts computing the masks that follow a step's tokens. A grammar's sequences continue as
        soon as the grammar's process has answered."""
        grown: dict[RemoteGrammar, dict[Sequence, None]] = {}
        for output in outputs:
            seq = output.seq
            if seq.params.grammar and output.token is not None and output.end is None:
                grown.setdefault(self._matchers[seq].grammar, {})[seq] = None
        for seqs in map(list, grown.values()):
            task = asyncio.create_task(self._guarded(partial(self._advance, seqs), seqs))
            self._masking.add(task)
            task.add_done_callback(self._masking.discard)

    @property
    def are_due(self) -> bool:
        """Whether masks of running sequences are being computed."""
        return bool(self._masking)

    def close(self) -> None:
        for task in (*self._beginning.values(), *self._masking):
            task.cancel()
        self._grammars.close()

    def _refusal(self, seq: Sequence, n: int) -> End | None:
        """The end of a sequence whose grammar must not be compiled, or None."""
        scheduler = self._engine.scheduler
        if end := scheduler.refusal(seq, n):
            return end
        if seq.key in self._beginning:
            return End(FinishCause.INVALID, "request: its number is in use")
        if seq.request.resubmitted:
            return None
        # As in the queue (`admission`), a client of whom nothing waits finds room.
        theirs, count = self._beginning_of[_sender(seq)], len(self._beginning)
        if theirs and count >= scheduler.limits.max_waiting:
            message = f"{count} requests already wait for their grammars"
            return End(FinishCause.QUEUE_FULL, message)
        return None

    def _begun(self, seq: Sequence) -> None:
        del self._beginning[seq.key]
        sender = _sender(seq)
        self._beginning_of[sender] -= 1
        if not self._beginning_of[sender]:
            del self._beginning_of[sender]

    async def _begin(self, seq: Sequence, n: int) -> None:
        params, grammar = seq.params, seq.params.grammar
        assert grammar is not None
        kind = GrammarKind(grammar.kind)
        client = seq.request.client.name or None
        began_at = self._engine.clock()
        use = await self._grammars.compile(kind, grammar.text, params.eos_token_ids, client)
        self._engine.metrics.grammar_compile.observe(self._engine.clock() - began_at)
        self._match(seq, use)
        (masks,) = await self._masks([seq], draft=False)
        if seq.status is not Status.FINISHED:
            self._engine.queue(seq, n)
        for follower in self._engine.scheduler.followers(seq):
            self._match(follower, use)
            follower.unpause(masks)
        seq.unpause(masks)

    def _match(self, seq: Sequence, use: GrammarUse) -> None:
        self._matchers[seq] = RemoteMatcher(use, seq.tokens, seq.num_prompt_tokens)

    async def _advance(self, grown: list[Sequence]) -> None:
        running = [seq for seq in grown if seq.status is not Status.FINISHED]
        if running:
            began_at = self._engine.clock()
            for seq, masks in zip(running, await self._masks(running, draft=True), strict=True):
                seq.unpause(masks)
            self._engine.metrics.grammar_mask.observe(self._engine.clock() - began_at)
            self._engine.wake()

    async def _masks(self, seqs: list[Sequence], *, draft: bool) -> list[Seq[bytes]]:
        """The next token's mask for each sequence of one grammar, and those that follow drafted
        tokens; none for an ended sequence."""
        speculation = self._engine.scheduler.speculation if draft else None
        guesses = [speculation.guess(seq).tokens for seq in seqs] if speculation else []
        matchers = [self._matchers[seq] for seq in seqs]
        outcomes = await matchers[0].grammar.masks(matchers, guesses)
        found: list[Seq[bytes]] = []
        for seq, outcome in zip(seqs, outcomes, strict=True):
            tokens: Seq[int] = ()
            masks: Seq[bytes] = ()
            if isinstance(outcome, GrammarError):
                self._end(seq, FinishCause.INVALID, str(outcome))
            elif outcome is None:  # the model has no end tokens, or all tokens were resubmitted
                self._end(seq, seq.finish_cause() or FinishCause.EOS, "")
            else:
                tokens, masks = outcome if isinstance(outcome, MaskedDraft) else ((), (outcome,))
                if not self._are_usable(tokens, masks):  # workers would fail at them
                    log.error("a mask is unusable; ending its sequence", bytes=len(masks[0]))
                    self._end(seq, FinishCause.INTERNAL, "internal error")
                    masks = ()
            if seq.guess:
                seq.guess.constrain(tokens)
            found.append([without_early_end(seq, mask, i) for i, mask in enumerate(masks)])
        return found

    def _are_usable(self, tokens: Seq[int], masks: Seq[bytes]) -> bool:
        """Whether tokens and masks are of the model's vocabulary, and each mask allows a token."""
        vocab_size = self._engine.scheduler.limits.vocab_size
        nothing = bytes(4 * -(-vocab_size // 32))
        return all(0 <= token < vocab_size for token in tokens) and all(
            len(mask) == len(nothing) and mask != nothing for mask in masks
        )

    async def _guarded(self, work: Callable[[], Awaitable[None]], seqs: list[Sequence]) -> None:
        """Does `work`. A failure ends these sequences, and no others."""
        try:
            await work()
        except GrammarError as error:
            cause, message = FinishCause.INVALID, str(error)
        except GrammarsBusyError as error:
            cause, message = FinishCause.QUEUE_FULL, str(error)
        except Exception as error:
            log.error("structured output failed; ending its sequences", exc_info=error)
            cause, message = FinishCause.INTERNAL, "internal error"
        else:
            return
        for seq in seqs:
            self._end(seq, cause, message)

    def _end(self, seq: Sequence, cause: FinishCause, message: str) -> None:
        if not seq.queued:
            retry_after_s = _RETRY_AFTER_S if cause is FinishCause.QUEUE_FULL else 0.0
            self._engine.refuse(seq, End(cause, message, retry_after_s))
        elif seq.status is not Status.FINISHED:
            self._engine.emit(self._engine.scheduler.end(seq, cause, message))


def _sender(seq: Sequence) -> str | int:
    """The client of a sequence, or the connection of an anonymous one."""
    return seq.request.client.name or seq.key.connection


def without_early_end(seq: Sequence, mask: bytes, num_drafts: int = 0) -> bytes:
    """Removes the end tokens from the mask of the token after `num_drafts` drafted ones, before
    `min_tokens`, unless no other token can follow."""
    if seq.num_generated_tokens + num_drafts >= seq.params.min_tokens:
        return mask
    words = np.frombuffer(mask, np.uint32).copy()
    for token in seq.params.end_token_ids:
        if token < 32 * len(words):
            words[token // 32] &= ~np.uint32(1 << token % 32)
    return words.tobytes() if words.any() else mask
