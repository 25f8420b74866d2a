"""Random completions of a JSON schema, over a vocabulary of single bytes."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for

from scheduler_svc.grammar.compiler import Compilers, Matcher, compile_grammar, make_compilers
from shared.sampling_params import GrammarKind
from shared.vocabulary import Vocabulary

END = 256
_CLOSING = b'"}]'
_LEADING_ON = b",:0@."
_MAX_BYTES = 2000
# Of all bytes that may come next, few are in texts that schemas tell apart.
_USUAL = frozenset(b'{}[]",:-+.0123456789abcdefgxyzstrunlTZ_@/ ')


@cache
def compilers() -> Compilers:
    return make_compilers(Vocabulary({i: bytes([i]) for i in range(256)} | {END: b""}), 1)


def allowed(mask: bytes) -> list[int]:
    """The tokens of a mask."""
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    return [int(token) for token in np.flatnonzero(bits)]


def completions(kind: GrammarKind, text: str, rng: random.Random, number: int) -> Iterator[str]:
    """Yields completions of a grammar, those left out that would become too long."""
    compiled = compile_grammar(compilers(), kind, text)
    for _ in range(number):
        matcher, spelled = Matcher(compiled, {END}), bytearray()
        while not matcher.finished and len(spelled) < _MAX_BYTES:
            byte = _choose(matcher, rng, len(spelled))
            matcher.accept(byte)
            if byte != END:
                spelled.append(byte)
        if matcher.finished:
            yield spelled.decode(errors="surrogatepass")


def allows(schema: Any, value: str) -> bool:
    """Whether a schema's grammar allows a text."""
    matcher = Matcher(
        compile_grammar(compilers(), GrammarKind.JSON_SCHEMA, json.dumps(schema)), [END]
    )
    for byte in value.encode():
        if byte not in allowed(matcher.mask()):
            return False
        matcher.accept(byte)
    return END in allowed(matcher.mask())


def mismatch(schema: Any, text: str) -> str:
    """Why a completion is not as its schema says, or an empty string."""
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"{text!r} is not JSON: {error}"
    checker = validator_for(schema, Draft202012Validator)(schema)
    with warnings.catch_warnings(action="ignore"):  # some expressions look like others
        error = next(checker.iter_errors(value), None)
    return f"{text!r}: {error.message[:200]}" if error else ""


def check_enforced(schema: Any, values: list[str]) -> None:
    """Checks that a schema's grammar allows these values, and nothing that the schema does not."""
    for value in values:
        assert not mismatch(schema, value), "the table is wrong"
        assert allows(schema, value), value
    found = [*completions(GrammarKind.JSON_SCHEMA, json.dumps(schema), random.Random(0), 30)]
    assert found
    for text in found:
        assert not mismatch(schema, text)


def _choose(matcher: Matcher, rng: random.Random, length: int) -> int:
    choice = allowed(matcher.mask())
    ends = 0.3 if length < 60 else 0.9
    for wanted, chance in ((_CLOSING, ends), (_LEADING_ON, 0.3), (_USUAL, 0.8)):
        some = [each for each in choice if each == END or each in wanted]
        if some and rng.random() < chance:
            return rng.choice(some)
    return rng.choice(choice)
