"""Incremental decoding against transformers decoding everything at once."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from frontend.text.detokenizer import IncrementalDetokenizer
from shared.vocabulary import Vocabulary, byte_alphabet, read_vocabulary
from tests.gguf_files import spm_keys
from worker_svc.gguf.configuration import Keys
from worker_svc.gguf.tokenizer import make_tokenizer

TEXTS = [
    "Once upon a time there was a fox.",
    "naïve café — “quotes”",
    "你好，世界！日本語もできます。한국어",
    "👩‍👩‍👧‍👦 family, 🇨🇭 flag, 👍🏽 thumb",
    "tabs\tand\nnewlines\r\n  and   spaces ",
    "\u0000\u007f\u0080 control",
]


@pytest.fixture(scope="module")
def table(hf: Any) -> dict[int, bytes]:
    special = {i: b"" for i, token in hf.added_tokens_decoder.items() if token.special}
    return {**read_vocabulary(hf.backend_tokenizer).tokens, **special}


def test_alphabet_is_that_of_the_tokenizers_library() -> None:
    alphabet = byte_alphabet()
    assert set(alphabet) == set(pre_tokenizers.ByteLevel.alphabet())
    pre = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for text in ("a", " ", "\n", "é", "你", "👍"):
        ((spelled, _),) = pre.pre_tokenize_str(text)
        assert bytes(alphabet[c] for c in spelled) == text.encode()


@pytest.mark.parametrize("text", TEXTS)
def test_each_character_comes_with_its_last_byte(
    text: str, hf: Any, table: dict[int, bytes]
) -> None:
    ids = hf(text).input_ids
    detokenizer = IncrementalDetokenizer(Vocabulary(table))
    so_far = ""
    for count, token_id in enumerate(ids, start=1):
        so_far += detokenizer.feed([token_id])
        whole = b"".join(table[i] for i in ids[:count]).decode(errors="ignore")
        assert so_far == whole
    assert (
        so_far + detokenizer.flush()
        == hf.decode(ids)
        == hf.backend_tokenizer.normalizer.normalize_str(text)
    )


@pytest.mark.parametrize("special", ["left out", "shown"])
@given(data=st.data())
def test_any_ids_in_any_groups_equal_transformers(
    data: st.DataObject, hf: Any, table: dict[int, bytes], special: str
) -> None:
    tokens = table if special == "left out" else read_vocabulary(hf.backend_tokenizer).tokens
    rare = [i for i, spelled in table.items() if len(spelled) < 2]  # bytes, and special tokens
    any_id = st.integers(0, len(table) - 1)
    ids = data.draw(st.lists(any_id | st.sampled_from(rare), max_size=40))
    detokenizer = IncrementalDetokenizer(Vocabulary(tokens))
    joined = "".join(map(detokenizer.feed, _groups(data, ids))) + detokenizer.flush()
    assert joined == hf.decode(ids, skip_special_tokens=special == "left out")


def test_special_and_unknown_ids_have_no_text(hf: Any, table: dict[int, bytes]) -> None:
    detokenizer = IncrementalDetokenizer(Vocabulary(table))
    (a,) = hf("a").input_ids
    end = hf.convert_tokens_to_ids("<|im_end|>")
    assert detokenizer.feed([end, a, 10_000_000, a, end]) == "aa"


def test_added_token_outside_the_alphabet_is_plain_text() -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(["<日本>"])
    assert read_vocabulary(tokenizer).tokens == {0: b"a", 1: "<日本>".encode()}


@pytest.fixture(scope="module", params=[True, False], ids=["strips", "keeps"])
def sentence_piece(request: pytest.FixtureRequest) -> Tokenizer:
    keys = {**spm_keys(280), "tokenizer.ggml.add_space_prefix": request.param}
    return make_tokenizer(Keys(keys))


@given(data=st.data())
def test_sentence_piece_equals_the_tokenizers_library(
    data: st.DataObject, sentence_piece: Tokenizer
) -> None:
    """Wherever all bytes are UTF-8: the library replaces whole runs of bytes that are not."""
    pieces = st.sampled_from(
        ["a", "▁a", "▁", "▁ab", "é", "word3", "<|im_end|>", "</s>", "日", "👍"]
    )
    ids = [
        token_id
        for piece in data.draw(st.lists(pieces, max_size=20))
        for token_id in _ids(sentence_piece, piece)
    ]
    vocabulary = read_vocabulary(sentence_piece)
    shown = IncrementalDetokenizer(vocabulary)
    joined = "".join(map(shown.feed, _groups(data, ids))) + shown.flush()
    assert joined == sentence_piece.decode(ids, skip_special_tokens=False)

    added = sentence_piece.get_added_tokens_decoder()
    tokens = {i: b"" if i in added else spelled for i, spelled in vocabulary.tokens.items()}
    text = IncrementalDetokenizer(replace(vocabulary, tokens=tokens))
    joined = "".join(map(text.feed, _groups(data, ids))) + text.flush()
    assert joined == sentence_piece.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("decoder", "name"),
    [
        (None, "none"),
        (decoders.Metaspace(), "Metaspace"),
        (decoders.Sequence([decoders.Fuse(), decoders.Metaspace()]), "Sequence Fuse Metaspace"),
    ],
)
def test_other_decoders_are_refused_by_name(decoder: Any, name: str) -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    if decoder:
        tokenizer.decoder = decoder
    with pytest.raises(ValueError, match=f"decoder {name} is not served; ByteLevel is"):
        read_vocabulary(tokenizer)


def _ids(tokenizer: Tokenizer, piece: str) -> list[int]:
    """The token that is `piece`, or one for each of its bytes."""
    known = tokenizer.token_to_id(piece)
    each = [f"<0x{byte:02X}>" for byte in piece.encode()] if known is None else [piece]
    return [tokenizer.token_to_id(token) for token in each]


def _groups(data: st.DataObject, ids: list[int]) -> list[list[int]]:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(ids)), max_size=8)) | {0, len(ids)})
    return [ids[a:b] for a, b in itertools.pairwise(cuts)]
