"""A grammar in use: its process, which is replaced when it dies.

A matcher's state is a function of its completion's tokens, which are kept here. A new process
receives all of them, and the completions continue as if nothing had happened. It sends each answer
before it begins the next. If it dies at the same matcher, that matcher is at fault.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Seq
from itertools import count
from weakref import finalize

import structlog

from scheduler_svc.grammar.errors import (
    Death,
    GrammarError,
    GrammarsBusyError,
    GuiltyGrammarError,
    ProcessDiedError,
)
from scheduler_svc.grammar.host_link import HostLink
from scheduler_svc.grammar.process import GrammarProcess, Outcome
from scheduler_svc.grammar.wire import COMPILE_CPU_S, MASK_CPU_S, MEMORY_BYTES, MaskRow
from scheduler_svc.suspects import MIN_LOSSES_ALONE
from shared.sampling_params import GrammarKind

log = structlog.get_logger(__name__)

_COMPILE_LIMITS = (
    f"needs more than {COMPILE_CPU_S:g} s of processor time or {MEMORY_BYTES >> 20} MiB of memory"
)
_MASK_LIMITS = (
    f"its mask needs more than {MASK_CPU_S:g} s of processor time or {MEMORY_BYTES >> 20} MiB of "
    "memory"
)
_MAX_CRASHES = 2  # of processes that compile a grammar
_MAX_KILLS = 5
# A death that cannot be a matcher's fault counts half, because processes are also killed by people
# and when memory runs out.
_WEIGHT_OF_KILLS = 0.5
_REPLACEMENT_S = 60.0  # for one to compile, because many may compile at a time


class RemoteGrammar:
    """A grammar's process, and the data needed to replace it.

    `num_bytes` is the memory of the process when it had compiled the grammar. `num_uses` counts
    the requests that use the grammar or wait for it; `client` sent the first of them. `replacing`
    limits the simultaneous compilations that replace processes, over all grammars.
    """

    compilation: asyncio.Task[None]

    def __init__(
        self,
        kind: GrammarKind,
        text: str,
        client: Hashable,
        link: HostLink,
        replacing: asyncio.Semaphore,
    ) -> None:
        self.kind = kind
        self.text = text
        self.client = client
        self.num_uses = 0
        self.num_bytes = 0
        self.guilt = ""  # why the grammar is rejected without another try
        self.process: GrammarProcess | None = None
        self._link = link
        self._replacing = replacing
        self._drafts = True  # until a process dies
        self._numbers = count()  # of matchers
        self._dropped: list[int] = []  # dropped matchers that the process still has
        self._turn = asyncio.Lock()

    @property
    def is_evictable(self) -> bool:
        return not self.num_uses and self.compilation.done()

    async def start(self, timeout_s: float) -> GrammarProcess:
        """Compiles the grammar in a new process, and in another one if that dies.

        Raises:
            GuiltyGrammarError: compiling it exceeds a limit, or crashes the process each time.
            GrammarError: it cannot be compiled, or not within `timeout_s`.
            GrammarsBusyError: the process was killed each time.
            VocabularyError: the model's tokenizer cannot be used.
        """
        deaths: Counter[Death] = Counter()
        while True:
            try:
                self.process = await GrammarProcess.start(self._link)
                self.num_bytes = await self.process.compile(self.kind, self.text, timeout_s)
                return self.process
            except ProcessDiedError as error:
                log.warning("grammar process died while compiling", reason=str(error))
                deaths[error.death] += 1
                match error.death:
                    case Death.AT_LIMIT:
                        raise GuiltyGrammarError(self.kind, _COMPILE_LIMITS) from error
                    case Death.SILENT:
                        reason = f"cannot be compiled within {timeout_s:g} seconds"
                        raise GrammarError(self.kind, reason) from error
                    case Death.CRASHED if deaths[Death.CRASHED] == _MAX_CRASHES:
                        raise GuiltyGrammarError(self.kind, str(error)) from error
                    case Death.KILLED if deaths[Death.KILLED] == _MAX_KILLS:
                        raise GrammarsBusyError(str(error)) from error
            except BaseException:
                self.close()
                raise

    def number_of(self, matcher: RemoteMatcher) -> int:
        """A number for a new matcher. The process drops the matcher once nothing refers to it."""
        number = next(self._numbers)
        finalize(matcher, self._dropped.append, number).atexit = False
        return number

    async def masks(
        self, matchers: Seq[RemoteMatcher], guesses: Seq[Seq[int] | None] = ()
    ) -> list[Outcome]:
        """Sends the matchers of this grammar their completions' new tokens, and returns an outcome
        for each. If the process dies, a new one takes over.

        Args:
            guesses: for each matcher, tokens that may follow, or None if nothing is to be drafted.

        Raises:
            GrammarError: the grammar cannot be compiled any more.
            GrammarsBusyError: every new process was killed.
            VocabularyError: the model's tokenizer cannot be used any more.
        """
        # A cancelled request would leave an answer of the process unread.
        guesses = guesses or [None] * len(matchers)
        return await asyncio.shield(asyncio.ensure_future(self._masks(matchers, guesses)))

    def close(self) -> None:
        """Ends the process."""
        if self.process is not None:
            self.process.close()

    async def _masks(
        self, matchers: Seq[RemoteMatcher], guesses: Seq[Seq[int] | None]
    ) -> list[Outcome]:
        async with self._turn:
            outcomes: list[Outcome] = []
            suspect, losses_alone, careful = -1, 0.0, len(matchers) == 1
            while len(outcomes) < len(matchers):
                process = await self._live_process()
                rest = zip(matchers[len(outcomes) :], guesses[len(outcomes) :], strict=True)
                rows = [
                    matcher.row(process, guess if self._drafts else None) for matcher, guess in rest
                ]
                dropped, self._dropped[:] = self._dropped[:], []
                try:
                    await process.masks(rows, dropped, outcomes, careful=careful)
                except ProcessDiedError as error:
                    self._drafts = False  # a draft may be the reason
                    log.warning(
                        "grammar process died; replacing it", pid=process.pid, reason=str(error)
                    )
                    if len(outcomes) != suspect:
                        suspect, losses_alone = len(outcomes), 0.0
                    if not error.death.can_be_its_fault:
                        losses_alone += _WEIGHT_OF_KILLS
                    elif careful:  # else it may have died at a later row, with this answer unsent
                        losses_alone += 1
                    if losses_alone >= MIN_LOSSES_ALONE:
                        at_limit = error.death is Death.AT_LIMIT
                        reason = _MASK_LIMITS if at_limit else str(error)
                        outcomes.append(GrammarError(self.kind, reason))
                    careful = True
            return outcomes

    async def _live_process(self) -> GrammarProcess:
        if self.process is not None and self.process.is_usable:
            return self.process
        async with self._replacing:
            return await self.start(_REPLACEMENT_S)


class GrammarUse:
    """A use of a grammar. The grammar's process is kept while this or a matcher of it lives."""

    def __init__(self, grammar: RemoteGrammar, end_token_ids: Iterable[int]) -> None:
        self.grammar = grammar
        self.end_token_ids = sorted(end_token_ids)


class RemoteMatcher:
    """The matcher of a completion, which is in its grammar's process. The completion is
    tokens[start:], to which the sequence appends. The process knows the first `_num_told` tokens.
    """

    __slots__ = ("__weakref__", "_num_told", "_number", "_process", "_start", "_tokens", "_use")

    def __init__(self, use: GrammarUse, tokens: array[int], start: int) -> None:
        self._use = use
        self._tokens = tokens
        self._start = start
        self._number = use.grammar.number_of(self)
        self._process: GrammarProcess | None = None  # the process that has the matcher
        self._num_told = 0

    @property
    def grammar(self) -> RemoteGrammar:
        return self._use.grammar

    def row(self, process: GrammarProcess, guess: Seq[int] | None) -> MaskRow:
        """The request for the next mask, with the tokens that `process` does not know yet."""
        is_open = process is self._process
        first = self._start + (self._num_told if is_open else 0)
        self._process, self._num_told = process, len(self._tokens) - self._start
        ends = None if is_open else self._use.end_token_ids
        return MaskRow(self._number, ends, self._tokens[first:].tolist(), guess)
