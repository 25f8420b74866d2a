"""Compiles each grammar once, on a thread."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from scheduler_svc.grammar.matcher import (
    CompiledGrammar,
    GrammarError,
    GrammarsBusyError,
    Matcher,
    fill_masks,
)
from scheduler_svc.grammar.schema import patterns, schema_problem
from scheduler_svc.grammar.vocabulary import read_vocabulary
from scheduler_svc.sampling import GrammarKind

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar as XGrammar
    from xgrammar import GrammarCompiler

Result = TypeVar("Result")
Key = tuple[GrammarKind, str]

MAX_TEXT_BYTES = 64 << 10
MAX_COMPILING = 2

# Consecutive whitespace within a JSON text: enough to indent, too little to go on for ever.
MAX_JSON_WHITESPACE = 32
# Regular expressions that match nothing that JSON escapes, whatever reads them.
_PLAIN = re.compile(
    r"""(?x) (?: [^\x00-\x1f"\\.\[]
    | \\[dw.+*?()|{}/^$-]
    | \[ (?: [a-z]-[a-z] | [A-Z]-[A-Z] | [0-9]-[0-9] | [^\x00-\x7f]-[^\x00-\x7f]
           | [^\x00-\x1f"\\^\]-] | \\[dw.] )+ \] )*"""
)
ANY_JSON = '{"type": ["object", "array"]}'


class Grammars:
    """Compiles the grammars that requests bring, and computes the masks of their tokens."""

    def __init__(
        self, model: Path, *, timeout_s: float = 30.0, max_cache_bytes: int = 256 << 20
    ) -> None:
        """Reads nothing yet.

        Args:
            model: the directory of tokenizer.json and config.json.
            timeout_s: for a compilation, including the wait for a thread but not loading xgrammar.
            max_cache_bytes: for compiled grammars; beyond it the least recently used are dropped.
        """
        self._model = model
        self._timeout_s = timeout_s
        self._max_cache_bytes = max_cache_bytes
        self._compilers: asyncio.Task[_Compilers] | None = None
        self._compiling: dict[Key, asyncio.Task[XGrammar]] = {}
        self._num_waiting: Counter[Key] = Counter()  # who wants what is being compiled
        self._started: set[Key] = set()  # of these, what has got a thread
        # Each with its size when it was new; least recently used first.
        self._compiled: OrderedDict[Key, tuple[XGrammar, int]] = OrderedDict()
        self._cache_bytes = 0
        self._slots = asyncio.Semaphore(MAX_COMPILING)
        self._filler = ThreadPoolExecutor(1, thread_name_prefix="masks")

    async def compile(
        self, kind: GrammarKind, text: str, end_token_ids: Iterable[int]
    ) -> CompiledGrammar:
        """Compiles the grammar in `text`, or waits for it if that is already under way.

        Raises:
            GrammarError: it cannot be compiled, or not within `timeout_s`. Nothing can stop its
                thread, which then goes on and keeps one of two places until it is done.
            GrammarsBusyError: no place became free within `timeout_s`.
            VocabularyError: the model's tokenizer cannot be used.
        """
        if len(text.encode()) > MAX_TEXT_BYTES:
            raise GrammarError(kind, f"is longer than {MAX_TEXT_BYTES} bytes")
        key = kind, ANY_JSON if kind is GrammarKind.JSON else text
        # Outside the time limit: a slow start is not the grammar's fault, and after a restart the
        # first to wait is a request that was accepted long ago.
        await self._loaded()
        try:
            async with asyncio.timeout(self._timeout_s):
                if key in self._compiled:
                    grammar, _ = self._compiled[key]
                    self._compiled.move_to_end(key)
                else:
                    grammar = await self._wait_for(key)
        except TimeoutError:
            limit = f"{self._timeout_s:g} seconds"
            if key not in self._started:
                raise GrammarsBusyError(
                    f"other grammars are being compiled since {limit}"
                ) from None
            raise GrammarError(kind, f"cannot be compiled within {limit}") from None
        return CompiledGrammar(kind, frozenset(end_token_ids), grammar)

    async def masks(self, matchers: Seq[Matcher]) -> list[bytes | GrammarError]:
        """Runs `fill_masks` on a thread. No matcher may be advanced in the meantime."""
        if not matchers:
            return []
        return await asyncio.get_running_loop().run_in_executor(self._filler, fill_masks, matchers)

    def close(self) -> None:
        """Waits for masks that are being filled, but for no compilation."""
        for task in self._compiling.values():
            task.cancel()
        if self._compilers is not None:
            self._compilers.cancel()
        self._filler.shutdown()

    async def _wait_for(self, key: Key) -> XGrammar:
        task = self._task(key)
        self._num_waiting[key] += 1
        try:
            return await asyncio.shield(task)
        finally:
            self._num_waiting[key] -= 1
            # Else what nobody wants any more would keep others from a place.
            if not self._num_waiting[key]:
                del self._num_waiting[key]
                if key not in self._started:
                    self._compiling.pop(key, None)
                    task.cancel()

    def _task(self, key: Key) -> asyncio.Task[XGrammar]:
        if key not in self._compiling:
            task = self._compiling[key] = asyncio.create_task(self._compile(*key))
            task.add_done_callback(partial(self._done, key))
        return self._compiling[key]

    async def _loaded(self) -> _Compilers:
        if self._compilers is None or (self._compilers.done() and self._compilers.exception()):
            self._compilers = asyncio.create_task(_on_thread(partial(_make_compilers, self._model)))
        return await asyncio.shield(self._compilers)

    async def _compile(self, kind: GrammarKind, text: str) -> XGrammar:
        compilers = await self._loaded()
        async with self._slots:
            self._started.add((kind, text))
            return await _on_thread(partial(_compile, compilers, kind, text))

    def _done(self, key: Key, task: asyncio.Task[XGrammar]) -> None:
        if self._compiling.get(key) is task:  # else it was given up, and maybe begun anew
            del self._compiling[key]
            self._started.discard(key)
        if task.cancelled() or task.exception():  # whoever still waits for it has it raised
            return
        size = _size(key, task.result())
        self._compiled[key] = task.result(), size
        self._cache_bytes += size
        while self._cache_bytes > self._max_cache_bytes:
            _, (_, dropped) = self._compiled.popitem(last=False)
            self._cache_bytes -= dropped


@dataclass(frozen=True, slots=True)
class _Compilers:
    """Over all tokens, and over those that may occur in JSON: xgrammar allows control characters in
    strings of a bounded length, which JSON does not (mlc-ai/xgrammar#800)."""

    any: GrammarCompiler
    json: GrammarCompiler


def _make_compilers(model: Path) -> _Compilers:
    """Reads the vocabulary, and may raise VocabularyError."""
    vocabulary = read_vocabulary(model)
    control = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")
    of_json = [b"" if control.search(token) else token for token in vocabulary]
    return _Compilers(_make_compiler(vocabulary), _make_compiler(of_json))


def _make_compiler(vocabulary: list[bytes]) -> GrammarCompiler:
    from xgrammar import GrammarCompiler, TokenizerInfo, VocabType

    info = TokenizerInfo(vocabulary, VocabType.RAW, vocab_size=len(vocabulary), stop_token_ids=[])
    return GrammarCompiler(info, max_threads=1, cache_enabled=False)


def _compile(compilers: _Compilers, kind: GrammarKind, text: str) -> XGrammar:
    """Compiles on the calling thread, and may raise GrammarError."""
    if kind is GrammarKind.JSON_SCHEMA and (problem := schema_problem(text)):
        raise GrammarError(kind, problem)
    try:
        match kind:
            case GrammarKind.REGEX:
                grammar = compilers.any.compile_regex(text)
            case GrammarKind.EBNF:
                grammar = compilers.any.compile_grammar(text)
            case _:
                for pattern in patterns(text):
                    _check_pattern(pattern)
                grammar = compilers.json.compile_json_schema(
                    text, max_whitespace_cnt=MAX_JSON_WHITESPACE
                )
    except (RuntimeError, ValueError, TypeError) as error:
        raise GrammarError(kind, _reason(kind, str(error))) from error
    matcher = Matcher(CompiledGrammar(kind, frozenset(), grammar))
    if not matcher.finished:
        matcher.mask()  # raises if nothing matches
    return grammar


def _check_pattern(pattern: str) -> None:
    """Refuses a pattern in a JSON schema if xgrammar would write what it matches into a JSON string
    as it is, instead of leaving out what JSON escapes, and that may come up. It does so where there
    are characters beyond ASCII, or where nothing would be left.

    Raises:
        GrammarError: see above.
        RuntimeError: it is no regular expression.
    """
    from xgrammar import Grammar

    read = Grammar.from_json_schema(json.dumps({"type": "string", "pattern": pattern}))
    if "json_string=true" not in str(read) and not _PLAIN.fullmatch(pattern):
        raise GrammarError(
            GrammarKind.JSON_SCHEMA,
            f"'pattern' {pattern[:50]!r} may match what JSON escapes, which is not supported",
        )


def _reason(kind: GrammarKind, message: str) -> str:
    """xgrammar's reason in a line, without its own source's lines and the whole of the text."""
    message = re.sub(r"\[[\d:]+\] \S+?:\d+: |Check failed: \(.*?\) is false: ", "", message)
    if kind is not GrammarKind.EBNF:  # of what it made of the text
        message = re.sub(r"EBNF \w+ error at line \d+, column \d+: ", "", message)
    message = message.split("The JSON string is:")[0]
    return " ".join(message.split())[:200] or "cannot be compiled"


def _size(key: Key, grammar: XGrammar) -> int:
    """Roughly the bytes that a grammar takes in the cache."""
    return 1024 + len(key[1]) + grammar.memory_size_bytes


async def _on_thread(work: Callable[[], Result]) -> Result:
    """Runs `work` on a thread that the process does not wait for when it ends, as it would for one
    of a pool: nothing bounds the time that a compilation takes."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def resolve(settle: Callable[[Any], None], value: Any) -> None:
        if not future.done():  # else nobody waits any more
            settle(value)

    def run() -> None:
        try:
            outcome: tuple[Callable[[Any], None], Any] = future.set_result, work()
        except Exception as error:
            outcome = future.set_exception, error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(resolve, *outcome)

    threading.Thread(target=run, name="grammar", daemon=True).start()
    return await future
