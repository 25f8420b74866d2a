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


def builder(**fields: Any) -> CompletionBuilder:
    sampling = Sampling(seed=0, max_tokens=100, eos_token_ids=(), stop_token_ids=(), stop=())
    return CompletionBuilder(VOCABULARY, replace(sampling, **fields))


SHOWN, EOS, STOP_ID = {"include_stop": True}, {"eos_token_ids": (257,)}, {"stop_token_ids": (257,)}


@pytest.mark.parametrize(
    ("fields", "fed", "text", "kept", "rest", "stop_string"),
    [
        # Tokens after a stop string are dropped. One that has its end inside is kept.
        ({"stop": ("stop",)}, b"a stopxyz", "a ", b"a stop", "", "stop"),
        ({"stop": ("to",)}, [*b"a", 256, *b"b"], "as", [*b"a", 256], "", "to"),
        ({"stop": ("to",), **SHOWN}, [*b"a", 256, *b"b"], "asto", [*b"a", 256], "", "to"),
        # Text that is held back comes at the end, and half a character is replaced.
        ({"stop": ("stop",)}, b"a sto", "a ", b"a sto", "sto", None),
        ({"stop": ("stop",)}, b"a\xc3", "a", b"a\xc3", "\ufffd", None),
        # Tokens that end it are kept without their text, unless it is asked for.
        (EOS, [*b"a", 257], "a", [*b"a", 257], "", None),
        (STOP_ID, [*b"a", 257], "a", [*b"a", 257], "", None),
        ({}, [*b"a", 257], "a</s>", [*b"a", 257], "", None),
        ({**EOS, **SHOWN}, [*b"a", 257], "a</s>", [*b"a", 257], "", None),
        ({**STOP_ID, **SHOWN}, [*b"a", 257], "a</s>", [*b"a", 257], "", None),
        ({"eos_token_ids": (258,), **SHOWN}, [*b"a", 258], "a", [*b"a", 258], "", None),
    ],
)
def test_text_and_tokens_end_where_they_should(
    fields: dict[str, Any],
    fed: Sequence[int],
    text: str,
    kept: Sequence[int],
    rest: str,
    stop_string: str | None,
) -> None:
    completion = builder(**fields)
    delta = completion.feed([*fed])
    assert (delta.text, list(delta.token_ids)) == (text, [*kept])
    assert completion.stop_string == stop_string
    assert completion.finish() == rest


@pytest.mark.parametrize(
    ("min_tokens", "count", "text"),
    [(0, 2, ""), (1, 2, ""), (2, 4, "ab"), (3, 4, "ab"), (4, 5, "abab")],
)
def test_stop_strings_within_the_first_min_tokens_are_text(
    min_tokens: int, count: int, text: str
) -> None:
    """The token that completes one must come after the first `min_tokens`, as in vLLM."""
    for groups in ([[t] for t in b"abab"], [list(b"abab")]):
        completion = builder(stop=("ab",), min_tokens=min_tokens)
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
        completion = builder(stop=tuple(stop), min_tokens=min_tokens, include_stop=include_stop)
        text, kept = "", []
        for group in groups:
            delta = completion.feed(group)
            assert delta.offset == len(kept)
            text += delta.text
            kept += delta.token_ids
            assert completion.num_tokens == len(kept)
            if completion.stop_string is not None:
                break
        text += completion.finish()
        return text, kept, completion.stop_string

    bounds = sorted({0, len(token_ids), *(c for c in cuts if c <= len(token_ids))})
    groups = [token_ids[a:b] for a, b in itertools.pairwise(bounds)]
    assert run(groups) == run([[t] for t in token_ids]) == run([token_ids])
