"""Completions built from tokens: what their text shows and where they end."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.request import Sampling
from frontend.text.completion import CompletionBuilder
from shared.vocabulary import Vocabulary

# Tokens 0-255 are bytes; then a word, an end of sequence that has text, and a special token.
BYTES = {number: bytes([number]) for number in range(256)}
VOCABULARY = Vocabulary({**BYTES, 256: b"stop", 257: b"</s>", 258: b""})


def builder(
    stop: Sequence[str] = (),
    eos: Sequence[int] = (),
    stop_ids: Sequence[int] = (),
    **fields: Any,
) -> CompletionBuilder:
    sampling = Sampling(
        temperature=0,
        seed=0,
        max_tokens=100,
        eos_token_ids=tuple(eos),
        stop_token_ids=tuple(stop_ids),
        stop=tuple(stop),
    )
    return CompletionBuilder(VOCABULARY, replace(sampling, **fields))


def test_offsets_count_tokens() -> None:
    completion = builder()
    deltas = [completion.feed(list(b"ab")), completion.feed(list(b"c")), completion.feed([])]
    assert [(d.text, d.offset) for d in deltas] == [("ab", 0), ("c", 2), ("", 3)]
    assert completion.num_tokens == 3


def test_tokens_after_the_stop_string_are_dropped() -> None:
    completion = builder(stop=["stop"])
    delta = completion.feed([*b"a s", *b"top", *b"xyz"])
    assert (delta.text, list(delta.token_ids)) == ("a ", [*b"a stop"])
    assert completion.stop_string == "stop"
    assert completion.finish() == ""


def test_stop_string_inside_a_token_keeps_that_token() -> None:
    completion = builder(stop=["to"])
    delta = completion.feed([*b"a", 256, *b"b"])
    assert (delta.text, list(delta.token_ids)) == ("as", [*b"a", 256])


def test_held_back_text_comes_at_the_end() -> None:
    completion = builder(stop=["stop"])
    assert completion.feed(list(b"a sto")).text == "a "
    assert completion.finish() == "sto"
    assert completion.stop_string is None


def test_half_a_character_at_the_end_is_replaced() -> None:
    completion = builder(stop=["stop"])
    assert completion.feed([*b"a", *"é".encode()[:1]]).text == "a"
    assert completion.finish() == "\ufffd"


def test_ending_tokens_are_kept_without_their_text() -> None:
    for completion in (builder(eos=[257]), builder(stop_ids=[257])):
        delta = completion.feed([*b"a", 257])
        assert (delta.text, list(delta.token_ids)) == ("a", [*b"a", 257])
    assert builder().feed([*b"a", 257]).text == "a</s>"  # not an end unless it is declared one


def test_what_ended_it_may_stay_in_the_text() -> None:
    completion = builder(stop=["to"], include_stop=True)
    delta = completion.feed([*b"a", 256, *b"b"])
    assert (delta.text, list(delta.token_ids)) == ("asto", [*b"a", 256])
    assert completion.stop_string == "to"
    for completion in (
        builder(eos=[257], include_stop=True),
        builder(stop_ids=[257], include_stop=True),
    ):
        assert completion.feed([*b"a", 257]).text == "a</s>"
    assert builder(eos=[258], include_stop=True).feed([*b"a", 258]).text == "a"  # it has no text


@pytest.mark.parametrize(
    ("min_tokens", "count", "text"),
    [(0, 2, ""), (1, 2, ""), (2, 4, "ab"), (3, 4, "ab"), (4, 5, "abab")],
)
def test_stop_strings_within_the_first_min_tokens_are_text(
    min_tokens: int, count: int, text: str
) -> None:
    """The token that completes one must come after the first `min_tokens`, as in vLLM."""
    for groups in ([[t] for t in b"abab"], [list(b"abab")]):
        completion = builder(stop=["ab"], min_tokens=min_tokens)
        shown = "".join(completion.feed(g).text for g in groups if completion.stop_string is None)
        shown += completion.finish()
        assert shown == text
        assert completion.num_tokens == min(count, 4)
        assert (completion.stop_string is None) is (min_tokens >= 4)


@given(
    token_ids=st.lists(st.integers(0, 258) | st.sampled_from([*"sé".encode(), 256]), max_size=30),
    stop=st.lists(st.text(min_size=1, max_size=3) | st.text("stopé", min_size=1), max_size=3),
    cuts=st.sets(st.integers(0, 30)),
    min_tokens=st.integers(0, 5),
    include_stop=st.booleans(),
)
def test_grouping_changes_nothing(
    token_ids: list[int], stop: list[str], cuts: set[int], min_tokens: int, include_stop: bool
) -> None:
    def run(groups: list[list[int]]) -> tuple[str, list[int], str | None]:
        completion = builder(stop=stop, min_tokens=min_tokens, include_stop=include_stop)
        text, kept = "", []
        for group in groups:
            delta = completion.feed(group)
            assert delta.offset == len(kept)
            text += delta.text
            kept += delta.token_ids
            if completion.stop_string is not None:
                break
        text += completion.finish()
        return text, kept, completion.stop_string

    bounds = sorted({0, len(token_ids), *(c for c in cuts if c <= len(token_ids))})
    groups = [token_ids[a:b] for a, b in itertools.pairwise(bounds)]
    assert run(groups) == run([[t] for t in token_ids]) == run([token_ids])
