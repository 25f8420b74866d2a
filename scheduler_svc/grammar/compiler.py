"""Structured output: compiles grammars, and finds the tokens that may come next in a completion
that matches a grammar.

xgrammar does both. Only the grammar host and its forks import this.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from xgrammar import CompiledGrammar as XGrammar
from xgrammar import Grammar, GrammarCompiler, GrammarMatcher, TokenizerInfo, VocabType

from scheduler_svc.grammar.errors import GrammarError
from scheduler_svc.grammar.schema.errors import SchemaError
from scheduler_svc.grammar.schema.nodes import to_text
from scheduler_svc.grammar.schema.reader import enforced_text
from scheduler_svc.grammar.schema.regex import RegexError, parse
from scheduler_svc.grammar.schema.tags import enforce
from shared.sampling_params import GrammarKind
from shared.vocabulary import Vocabulary

# After this much processor time, a draft gains less than it costs, or the grammar is a hostile one.
_MAX_DRAFT_CPU_S = 0.002
ANY_JSON = '{"type": ["object", "array"]}'


class Spelling(NamedTuple):
    """The tokens of a vocabulary by the bytes that they spell."""

    token_of: dict[bytes, int]
    longest: int  # bytes

    def first_token(self, text: bytes) -> int | None:
        """The longest token that `text` begins with."""
        for length in range(min(self.longest, len(text)), 0, -1):
            if (token := self.token_of.get(text[:length])) is not None:
                return token
        return None


@dataclass(frozen=True, slots=True)
class Compilers:
    """Compilers over all tokens, and over those that may occur in JSON. xgrammar allows control
    characters in strings of a bounded length, which JSON does not (mlc-ai/xgrammar#800).

    `max_whitespace` limits the characters in a row between a JSON text's tokens; None: no limit.
    If `strips_space`, a completion begins with a space that is not part of its text.
    """

    any: GrammarCompiler
    json: GrammarCompiler
    max_whitespace: int | None
    strips_space: bool
    spelling: Spelling


def make_compilers(vocabulary: Vocabulary, max_whitespace: int | None) -> Compilers:
    """Makes the compilers for a vocabulary with the ids 0 to n.

    Args:
        max_whitespace: see `Compilers`.
    """
    tokens = [vocabulary.tokens[number] for number in range(len(vocabulary.tokens))]
    control = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")
    of_json = [b"" if control.search(token) else token for token in tokens]
    # Of several tokens that spell the same, the first.
    token_of = {token: number for number, token in reversed([*enumerate(tokens)]) if token}
    return Compilers(
        _make_compiler(tokens),
        _make_compiler(of_json),
        max_whitespace,
        vocabulary.strips_space,
        Spelling(token_of, max(map(len, token_of), default=0)),
    )


def _make_compiler(vocabulary: list[bytes]) -> GrammarCompiler:
    info = TokenizerInfo(vocabulary, VocabType.RAW, vocab_size=len(vocabulary), stop_token_ids=[])
    return GrammarCompiler(info, max_threads=1, cache_enabled=False)


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar over a vocabulary."""

    kind: GrammarKind
    xgrammar: XGrammar
    spelling: Spelling

    @property
    def vocab_size(self) -> int:
        return int(self.xgrammar.tokenizer_info.vocab_size)


class Matcher:
    """Tracks a completion's position in its grammar, which depends only on the completion's tokens.

    `finished` becomes true with an end token or, if there are no end tokens, once the grammar is
    complete and nothing more can follow. End tokens may come only once the grammar is complete,
    even where it would allow the text that they spell.
    """

    __slots__ = (
        "_compiled",
        "_ends",
        "_kind",
        "_num_tokens",
        "_vocab_size",
        "_xgrammar",
        "finished",
    )

    def __init__(self, compiled: CompiledGrammar, end_token_ids: Iterable[int]) -> None:
        self._compiled = compiled
        self._kind, self._vocab_size = compiled.kind, compiled.vocab_size
        self._ends = [i for i in sorted(end_token_ids) if 0 <= i < self._vocab_size]
        self._xgrammar = GrammarMatcher(compiled.xgrammar, override_stop_tokens=self._ends or None)
        self._num_tokens = 0
        self.finished = self._is_finished()

    def accept(self, token: int) -> None:
        """Advances by one token.

        Raises:
            GrammarError: the grammar does not allow the token here.
        """
        if self.finished or not self._xgrammar.accept_token(token):
            raise GrammarError(
                self._kind,
                f"token {token} at index {self._num_tokens} of the completion does not match",
            )
        self._num_tokens += 1
        self.finished = self._is_finished()

    def mask(self) -> bytes:
        """The tokens that may come next: uint32[ceil(vocab / 32)], lowest bit first. Do not call it
        on a finished matcher.

        Raises:
            GrammarError: no token may come next.
        """
        mask = self._fill().tobytes()
        if mask == bytes(len(mask)):  # a tenth of the time that `any` takes
            reason = f"after {self._num_tokens} tokens of the completion none can follow"
            raise GrammarError(self._kind, reason)
        return mask

    def draft(self, guess: Iterable[int], max_tokens: int) -> list[tuple[int, bytes]]:
        """Tokens that may come next, each with the mask of the token after it: those of `guess`, as
        far as the grammar allows them, then those of the text that it forces."""
        drafted: list[tuple[int, bytes]] = []
        num_accepted, began = 0, time.process_time()
        for token in self._drafted(guess):
            num_accepted += 1
            mask = self._fill()
            if not mask.any() or len(drafted) == max_tokens:
                break
            drafted.append((token, mask.tobytes()))
            if time.process_time() - began > _MAX_DRAFT_CPU_S:
                break
        if num_accepted:
            self._xgrammar.rollback(num_accepted)
        return drafted

    def _drafted(self, guess: Iterable[int]) -> Iterator[int]:
        """Tokens that the grammar has just accepted, but no end tokens."""
        for token in guess:
            if token in self._ends or not self._xgrammar.accept_token(token):
                break
            yield token
        while text := self._xgrammar.find_jump_forward_string():
            forced = self._compiled.spelling.first_token(text.encode())
            if forced is None or forced in self._ends or not self._xgrammar.accept_token(forced):
                return
            yield forced

    def _is_finished(self) -> bool:
        if self._ends:
            return bool(self._xgrammar.is_terminated())
        return self._xgrammar.is_completed() and not self._fill().any()

    def _fill(self) -> npt.NDArray[np.int32]:
        row = np.zeros((1, -(-self._vocab_size // 32)), np.int32)
        self._xgrammar.fill_next_token_bitmask(row)
        if padding := -self._vocab_size % 32:  # xgrammar sets these bits
            row[0, -1] &= np.int32((1 << (32 - padding)) - 1)
        return row


def compile_grammar(compilers: Compilers, kind: GrammarKind, text: str) -> CompiledGrammar:
    """Compiles a grammar.

    Raises:
        GrammarError: the grammar cannot be used.
        MemoryError: the grammar needs more memory than there is.
    """
    if kind is GrammarKind.JSON:
        text = ANY_JSON
    try:
        match kind:
            case GrammarKind.REGEX:
                read = Grammar.from_regex(to_text(parse(text)))
                grammar = _compile(compilers, compilers.any, read)
            case GrammarKind.EBNF:
                grammar = _compile(compilers, compilers.any, Grammar.from_ebnf(text))
            case GrammarKind.STRUCTURAL_TAG:
                grammar = _compile_tag(compilers, text)
            case _:
                text = enforced_text(text) if kind is GrammarKind.JSON_SCHEMA else text
                read = Grammar.from_json_schema(text, max_whitespace_cnt=compilers.max_whitespace)
                grammar = _compile(compilers, compilers.json, read)
    except (SchemaError, RegexError) as error:
        raise GrammarError(kind, str(error)) from error
    except (RuntimeError, ValueError, TypeError) as error:
        if is_out_of_memory(error):
            raise MemoryError from error
        raise GrammarError(kind, _reason(kind, str(error))) from error
    compiled = CompiledGrammar(kind, grammar, compilers.spelling)
    matcher = Matcher(compiled, ())
    if not matcher.finished:
        matcher.mask()  # raises if nothing matches
    return compiled


def _compile_tag(compilers: Compilers, text: str) -> XGrammar:
    tag = json.loads(text)
    if isinstance(tag, dict) and "structures" in tag:
        tag = _triggered_tags(tag)
    has_json = enforce(tag, compilers.max_whitespace)
    compiler = compilers.json if has_json else compilers.any
    if compilers.strips_space:
        return _compile(compilers, compiler, Grammar.from_structural_tag(json.dumps(tag)))
    return compiler.compile_structural_tag(json.dumps(tag))


def _compile(compilers: Compilers, compiler: GrammarCompiler, grammar: Grammar) -> XGrammar:
    if compilers.strips_space:
        # Without the space, no completion could begin with one that is part of the text.
        grammar = Grammar.concat(Grammar.from_regex(" "), grammar)
    return compiler.compile_grammar(grammar)


def _triggered_tags(older: dict[str, Any]) -> dict[str, Any]:
    """The structural tag that is equivalent to one of the older form."""
    try:
        tags = [
            {
                "type": "tag",
                "begin": each["begin"],
                "content": {"type": "json_schema", "json_schema": _schema_of(each)},
                "end": each["end"],
            }
            for each in older["structures"]
        ]
    except (KeyError, TypeError) as error:
        reason = "'structures' must be a list of objects with 'begin', 'schema' and 'end'"
        raise GrammarError(GrammarKind.STRUCTURAL_TAG, reason) from error
    triggers = older.get("triggers", [])
    triggered = {"type": "triggered_tags", "triggers": triggers, "tags": tags}
    return {"type": "structural_tag", "format": triggered}


def _schema_of(structure: dict[str, Any]) -> Any:
    schema = structure["schema"]
    return json.loads(schema) if isinstance(schema, str) else schema


def is_out_of_memory(error: Exception) -> bool:
    """Whether xgrammar raised an error for C++'s std::bad_alloc."""
    return "bad_alloc" in str(error)


def _reason(kind: GrammarKind, message: str) -> str:
    """xgrammar's reason on one line, without its source locations and the full text."""
    message = re.sub(r"\[[\d:]+\] \S+?:\d+: |Check failed: \(.*?\) is false: ", "", message)
    if kind is not GrammarKind.EBNF:  # positions in xgrammar's translation
        message = re.sub(r"EBNF \w+ error at line \d+, column \d+: ", "", message)
    message = message.split("The JSON string is:")[0]
    return " ".join(message.split())[:200] or "cannot be compiled"
