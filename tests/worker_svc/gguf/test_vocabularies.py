"""Real vocabularies of GGUF files: token ids are llama.cpp's, text streams back, and grammars allow
exactly it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from frontend.text.detokenizer import IncrementalDetokenizer
from scheduler_svc.grammar import vocabulary as grammar_vocabulary
from scheduler_svc.grammar.compiler import Matcher, compile_grammar, make_compilers
from shared.sampling_params import GrammarKind
from shared.vocabulary import read_vocabulary
from tests.others import smollm2, vocabulary
from tests.scheduler_svc.grammar.schema.walks import allowed
from worker_svc.gguf.configuration import Keys
from worker_svc.gguf.header import read_header
from worker_svc.gguf.tokenizer import make_tokenizer

NAMES = ("llama-spm", "llama-bpe", "qwen2", "gpt-2")
# The ids that llama-server's /tokenize gives for the same texts with SmolLM2's file, a line each.
SMOLLM2 = Path(__file__).parent / "smollm2-tokens.txt"
_BETWEEN = "\n__ggml_vocab_test__\n"


def vectors(name: str) -> list[tuple[str, list[int]]]:
    """Texts with llama.cpp's token ids."""
    path = vocabulary("gpt-2" if name == "smollm2" else name)
    texts = path.with_suffix(".gguf.inp").read_text(encoding="utf-8").split(_BETWEEN)
    assert not texts.pop().strip()
    answers = SMOLLM2 if name == "smollm2" else path.with_suffix(".gguf.out")
    lines = answers.read_text().splitlines()
    return list(zip(texts, [list(map(int, line.split())) for line in lines], strict=True))


def gguf_file(name: str) -> Path:
    return smollm2() if name == "smollm2" else vocabulary(name)


@pytest.fixture(scope="module", params=[*NAMES, "smollm2"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the tokenizer."""
    directory = tmp_path_factory.mktemp(name)
    keys = Keys(read_header(gguf_file(name)).keys)
    make_tokenizer(keys).save(str(directory / "tokenizer.json"))
    size = len(keys.get("tokenizer.ggml.tokens", list))
    (directory / "config.json").write_text(json.dumps({"vocab_size": size}))
    return directory


def test_ids_are_those_of_llama_cpp_and_stream_as_text(name: str, model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    pieces = read_vocabulary(tokenizer)
    for text, ids in vectors(name):
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids, text
        shown = IncrementalDetokenizer(pieces)
        assert "".join(shown.feed([each]) for each in ids) + shown.flush() == text


def test_grammars_allow_a_text_and_then_its_end(name: str, model: Path) -> None:
    pieces = grammar_vocabulary.read_vocabulary(model)
    compilers, end = make_compilers(pieces, 20), {1}
    for text, ids in vectors(name):
        if not text:
            continue
        matcher = Matcher(compile_grammar(compilers, GrammarKind.REGEX, re.escape(text)), end)
        for each in [*ids, 1]:
            assert each in allowed(matcher.mask()), text
            matcher.accept(each)
        assert matcher.finished
