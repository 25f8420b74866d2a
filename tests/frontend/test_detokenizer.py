"""Incremental decoding against transformers decoding everything at once."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from frontend.text.detokenizer import IncrementalDetokenizer, byte_alphabet, token_bytes

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
    return {**token_bytes(hf.get_vocab()), **special}


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
    detokenizer = IncrementalDetokenizer(table)
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


@given(data=st.data())
def test_any_ids_in_any_groups_equal_transformers(
    data: st.DataObject, hf: Any, table: dict[int, bytes]
) -> None:
    byte_ids = [i for i, spelled in table.items() if len(spelled) == 1]
    any_id = st.integers(0, len(table) - 1)
    ids = data.draw(st.lists(any_id | st.sampled_from(byte_ids), max_size=40))
    groups = _groups(data, ids)
    detokenizer = IncrementalDetokenizer(table)
    deltas = [detokenizer.feed(group) for group in groups]
    joined = "".join(deltas) + detokenizer.flush()
    assert joined == hf.decode(ids, skip_special_tokens=True)


@given(data=st.data())
def test_special_tokens_may_be_shown(data: st.DataObject, hf: Any) -> None:
    special = [i for i, token in hf.added_tokens_decoder.items() if token.special]
    table = token_bytes(hf.get_vocab())
    any_id = st.integers(0, len(table) - 1)
    ids = data.draw(st.lists(any_id | st.sampled_from(special), max_size=20))
    detokenizer = IncrementalDetokenizer(table)
    shown = detokenizer.feed(ids) + detokenizer.flush()
    assert shown == hf.decode(ids, skip_special_tokens=False)


def test_special_and_unknown_ids_have_no_text(hf: Any, table: dict[int, bytes]) -> None:
    detokenizer = IncrementalDetokenizer(table)
    (a,) = hf("a").input_ids
    end = hf.convert_tokens_to_ids("<|im_end|>")
    assert detokenizer.feed([end, a, 10_000_000, a, end]) == "aa"


def test_added_token_outside_the_alphabet_is_plain_text() -> None:
    table = token_bytes({"a": 0, "<日本>": 1})
    assert table == {0: b"a", 1: "<日本>".encode()}


def _groups(data: st.DataObject, ids: list[int]) -> list[list[int]]:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(ids)), max_size=8)) | {0, len(ids)})
    return [ids[a:b] for a, b in itertools.pairwise(cuts)]
