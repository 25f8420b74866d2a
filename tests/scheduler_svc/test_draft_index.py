"""Drafts of a sequence's next tokens."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.core.guesses.draft_index import MAX_MATCH, Draft, DraftIndex


def match_len(tokens: list[int], end: int) -> int:
    """The number of tokens before `end` that equal the last ones, at most `MAX_MATCH`."""
    length = 0
    while length < min(end, MAX_MATCH) and tokens[end - 1 - length] == tokens[-1 - length]:
        length += 1
    return length


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "draft"),
    [
        ([7, 1, 2, 3, 4, 5, 6, 9, 1, 2], 4, Draft([3, 4, 5, 6], 2)),
        ([1, 2, 3], 4, Draft([], 0)),
        ([1], 4, Draft([], 0)),
        ([], 4, Draft([], 0)),
        # The longest match wins, and of equally long ones the newest.
        ([1, 2, 3, 10, 8, 2, 3, 11, 9, 3, 12, 1, 2, 3], 1, Draft([10], 3)),
        ([2, 3, 10, 2, 3, 11, 4, 2, 3], 1, Draft([11], 2)),
        # A draft that is longer than its source repeats it.
        ([1, 8, 9, 8, 9], 5, Draft([8, 9, 8, 9, 8], 2)),
        ([6, 6], 3, Draft([6, 6, 6], 1)),
        ([1, 2, 3, 4, 1], 2, Draft([2, 3], 1)),
        ([1, 2, 3, 4, 1], 0, Draft([], 0)),
        ([*range(100), *range(50)], 2, Draft([50, 51], MAX_MATCH)),
    ],
)
def test_the_draft_is_what_followed_the_last_tokens_before(
    tokens: list[int], max_tokens: int, draft: Draft
) -> None:
    assert DraftIndex(array("i", tokens)).propose(max_tokens) == draft


def test_appended_tokens_count_at_the_next_draft() -> None:
    tokens = array("i", [1, 2, 3])
    index = DraftIndex(tokens)
    assert not index.propose(2).tokens
    tokens.append(1)
    assert index.propose(2).tokens == [2, 3]
    tokens.extend([2, 4, 1, 2])
    assert index.propose(1).tokens == [4]


def test_a_text_is_followed_however_far_back_it_is() -> None:
    """Its tokens are so frequent elsewhere that the search alone would not reach it."""
    text = [1, 50, 1, 51, 1, 52, 1, 53, 1, 54]
    tokens = array("i", text + [1, 2] * 300 + [9, *text[:4]])
    index = DraftIndex(tokens)
    for end in range(4, len(text)):
        draft = index.propose(1)
        assert draft.tokens == [text[end]]
        tokens.append(text[end])


def test_a_changed_token_in_a_copy_does_not_end_the_following() -> None:
    text = [1, 50, 1, 51, 1, 52, 1, 53]
    tokens = array("i", text + [1, 2] * 300 + [50])
    index = DraftIndex(tokens)
    assert index.propose(2).tokens == [1, 51]
    tokens.extend([1, 99, 1])  # where the text has 51, 1
    assert index.propose(1).tokens == [52]


def test_a_long_prompt_is_indexed_in_parts() -> None:
    """No call takes as long as a prompt of any length would take."""
    tokens = array("i", range(100_000))
    tokens.append(0)
    index = DraftIndex(tokens)
    calls = 1
    while not index.propose(2).tokens:
        calls += 1
        assert calls <= 1000
    assert calls >= 10
    assert index.propose(2).tokens == [1, 2]


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=40))
def test_every_draft_is_what_followed_a_real_match(prompt: list[int], output: list[int]) -> None:
    tokens = array("i", prompt)
    index = DraftIndex(tokens)
    for token in output:
        draft = index.propose(5)
        known = tokens.tolist()
        matches = {end: match_len(known, end) for end in range(1, len(known))}
        if not any(matches.values()):
            assert draft == Draft([], 0)
        else:
            # The newest 8 occurrences of the last token are searched, at least.
            newest = [length for length in reversed(matches.values()) if length][:8]
            assert max(newest) <= draft.match_len <= max(matches.values())
            sources = [end for end, length in matches.items() if length == draft.match_len]
            repeated = [(known[end:] * 5)[:5] for end in sources]
            assert draft.tokens in repeated
        tokens.append(token)
