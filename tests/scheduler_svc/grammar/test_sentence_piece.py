"""Structured output with a tokenizer like Llama 2's: a text's first space is not part of it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from scheduler_svc.grammar.compiler import Compilers, Matcher, compile_grammar, make_compilers
from scheduler_svc.grammar.vocabulary import read_vocabulary
from shared.sampling_params import GrammarKind
from tests.gguf_files import spm_keys
from tests.scheduler_svc.grammar.schema.walks import allowed
from tests.scheduler_svc.grammar.test_grammar import KINDS, walk
from worker_svc.gguf.configuration import Keys
from worker_svc.gguf.tokenizer import make_tokenizer

VOCAB_SIZE = 300
END = 2
SPACE = 259
CLOSERS = frozenset(3 + byte for byte in b'"}],:0')


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE}))
    make_tokenizer(Keys(spm_keys(VOCAB_SIZE))).save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def compilers(model: Path) -> Compilers:
    return make_compilers(read_vocabulary(model), 20)


def text_of(model: Path, tokens: list[int]) -> str:
    vocabulary = read_vocabulary(model)
    assert vocabulary.strips_space
    spelled = b"".join(vocabulary.tokens[token] for token in tokens)
    return spelled.decode(errors="surrogatepass").removeprefix(" ")


@pytest.mark.parametrize("name", KINDS)
def test_allowed_tokens_match_the_grammar(name: str, model: Path, compilers: Compilers) -> None:
    kind, text, matches = KINDS[name]
    compiled = compile_grammar(compilers, kind, text)
    for seed in range(5):
        tokens = walk(Matcher(compiled, {END}), random.Random(seed), CLOSERS | {END})
        shown = text_of(model, tokens[:-1])
        assert matches(shown), f"seed {seed}: {shown!r}"


def test_a_text_may_begin_with_a_space_of_its_own(model: Path, compilers: Compilers) -> None:
    matcher = Matcher(compile_grammar(compilers, GrammarKind.REGEX, " a"), {END})
    tokens = []
    while not matcher.finished:
        tokens.append(allowed(matcher.mask())[-1])
        matcher.accept(tokens[-1])
    assert text_of(model, tokens[:-1]) == " a"
    assert tokens[0] == SPACE
