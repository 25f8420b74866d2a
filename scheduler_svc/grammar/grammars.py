"""The grammars that requests bring, each in a process of its own.

text ──▶ waits for room and a slot ──▶ is compiled ──▶ in use ◀──▶ idle ──▶ evicted
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from contextlib import suppress
from weakref import finalize

from scheduler_svc.grammar.errors import (
    GrammarError,
    GrammarsBusyError,
    GuiltyGrammarError,
    ProcessDiedError,
)
from scheduler_svc.grammar.grammar import GrammarUse, RemoteGrammar
from scheduler_svc.grammar.host_link import HostLink
from scheduler_svc.grammar.process import GrammarProcess
from shared.sampling_params import GrammarKind
from shared.slots import Slots

# docs/internals/structured-output.md describes these limits.
MAX_TEXT_BYTES = 64 << 10
_MAX_COMPILING = 2  # at a time; and as many more to replace processes that died
_MAX_PROCESSES = 64  # grammars at a time
_MAX_BYTES = 1 << 30  # of all grammars' private memory when they were compiled
_WAIT_S = 30.0  # for a slot, and then for the compilation
# A grammar that killed its process while it was compiled is rejected for this long.
_GUILTY_S = 300.0

Key = tuple[GrammarKind, str]


class Grammars:
    """Compiles the grammars that requests bring, and computes the masks of their tokens. Use it
    from one event loop only."""

    def __init__(self, link: HostLink) -> None:
        """Demands nothing of the host yet."""
        self._link = link
        self._loading: asyncio.Task[None] | None = None
        self._grammars: dict[Key, RemoteGrammar] = {}
        # Grammars that have a process, or are about to have one; least recently used first.
        self._started: OrderedDict[Key, RemoteGrammar] = OrderedDict()
        self._slots = Slots(_MAX_COMPILING, self._make_room)
        self._replacing = asyncio.Semaphore(_MAX_COMPILING)

    async def compile(
        self, kind: GrammarKind, text: str, end_token_ids: Iterable[int], client: Hashable = None
    ) -> GrammarUse:
        """Compiles the grammar in `text`, or waits for it if it is already being compiled.

        Args:
            client: clients take turns, and no client may use more than half of the processes;
                None: no limit.

        Raises:
            GrammarError: it cannot be compiled, or not within the limits.
            GrammarsBusyError: there was no room or no slot for it in time.
            VocabularyError: the model's tokenizer cannot be used.
        """
        if len(text.encode()) > MAX_TEXT_BYTES:
            raise GrammarError(kind, f"is longer than {MAX_TEXT_BYTES} bytes")
        key = kind, "" if kind is GrammarKind.JSON else text
        # Outside the time limit, because a slow start is not the grammar's fault. After a restart,
        # the first request to wait was accepted long ago.
        await self._loaded()
        grammar = self._find(key, client)
        if grammar.guilt:
            raise GuiltyGrammarError(kind, grammar.guilt)
        grammar.num_uses += 1
        try:
            await asyncio.shield(grammar.compilation)
        except BaseException:
            self._drop_use(key, grammar)
            raise
        use = GrammarUse(grammar, end_token_ids)
        finalize(use, self._drop_use, key, grammar).atexit = False
        return use

    def close(self) -> None:
        """Ends all processes."""
        if self._loading is not None:
            self._loading.cancel()
        for grammar in self._grammars.values():
            grammar.compilation.cancel()
            grammar.close()

    async def _loaded(self) -> None:
        if self._loading is None or (self._loading.done() and self._loading.exception()):
            self._loading = asyncio.create_task(self._load())
        await asyncio.shield(self._loading)

    async def _load(self) -> None:
        """Starts a process, and ends it. The host has then loaded all that processes share."""
        with suppress(ProcessDiedError):
            (await GrammarProcess.start(self._link)).close()

    def _find(self, key: Key, client: Hashable) -> RemoteGrammar:
        if key not in self._grammars:
            grammar = RemoteGrammar(*key, client, self._link, self._replacing)
            self._grammars[key] = grammar
            grammar.compilation = asyncio.create_task(self._compile(key, grammar))
        if key in self._started:
            self._started.move_to_end(key)
        return self._grammars[key]

    async def _compile(self, key: Key, grammar: RemoteGrammar) -> None:
        try:
            await self._enter(grammar.client)
            try:
                self._started[key] = grammar
                await grammar.start(_WAIT_S)
            finally:
                self._slots.leave()
        except GuiltyGrammarError as error:
            grammar.guilt = error.reason
            self._forget(key, grammar)
            self._grammars.setdefault(key, grammar)  # without a process
            asyncio.get_running_loop().call_later(_GUILTY_S, self._forget, key, grammar)
            raise
        except BaseException:
            self._forget(key, grammar)
            raise

    async def _enter(self, client: Hashable) -> None:
        try:
            async with asyncio.timeout(_WAIT_S):
                await self._slots.enter(client)
        except TimeoutError:
            reason = f"other grammars have taken all slots for {_WAIT_S:g} seconds"
            raise GrammarsBusyError(reason) from None

    def _drop_use(self, key: Key, grammar: RemoteGrammar) -> None:
        grammar.num_uses -= 1
        if grammar.num_uses:
            return
        if not grammar.compilation.done():  # no request needs it now, and others may need the slot
            grammar.compilation.cancel()
            self._forget(key, grammar)
        self._slots.fill()

    def _forget(self, key: Key, grammar: RemoteGrammar) -> None:
        for grammars in (self._grammars, self._started):
            if grammars.get(key) is grammar:
                del grammars[key]

    def _make_room(self, client: Hashable) -> bool:
        """Evicts idle grammars until one more may be compiled for a client. Returns False if none
        may be compiled."""
        started = self._started.values()  # few, however many wait
        if client is not None:
            theirs = sum(each.client == client and not each.is_evictable for each in started)
            if theirs >= max(_MAX_PROCESSES // 2, 1):
                return False
        num_bytes = sum(grammar.num_bytes for grammar in started)
        for key, grammar in [*self._started.items()]:
            if len(started) < _MAX_PROCESSES and num_bytes < _MAX_BYTES:
                return True
            if grammar.is_evictable:
                grammar.close()
                self._forget(key, grammar)
                num_bytes -= grammar.num_bytes
        return len(started) < _MAX_PROCESSES and num_bytes < _MAX_BYTES
