"""Stop strings against a search that sees the whole text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from frontend.stop_strings import StopStringMatcher

PIECES = st.lists(st.text("ab c", max_size=5), max_size=12)
STOPS = st.lists(st.text("ab c", min_size=1, max_size=5), min_size=1, max_size=4)


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopStringMatcher(stops)
    free = ""
    for piece in pieces:
        text, found = matcher.feed(piece)
        free += text
        if found is not None:
            return free, found
    return free + matcher.flush(), None


def search(stops: list[str], text: str) -> tuple[str, str | None]:
    """The first character that completes a stop string, and the longest that it completes."""
    for end in range(1, len(text) + 1):
        ending_here = [stop for stop in stops if text[:end].endswith(stop)]
        if ending_here:
            longest = max(ending_here, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(stops=STOPS, pieces=PIECES)
def test_any_pieces_give_what_a_search_of_the_whole_gives(
    stops: list[str], pieces: list[str]
) -> None:
    assert run(stops, pieces) == search(stops, "".join(pieces))


@given(stops=STOPS, pieces=PIECES)
def test_no_text_is_held_back_without_need(stops: list[str], pieces: list[str]) -> None:
    matcher = StopStringMatcher(stops)
    fed = free = ""
    for piece in pieces:
        text, found = matcher.feed(piece)
        if found is not None:
            return
        fed += piece
        free += text
        held = fed[len(free) :]
        assert fed.startswith(free)
        longest = max(
            (n for stop in stops for n in range(len(stop)) if fed.endswith(stop[:n])), default=0
        )
        assert len(held) == longest


def test_stop_string_that_spans_pieces_is_never_shown() -> None:
    matcher = StopStringMatcher(["\n\nUser:"])
    assert matcher.feed("Hello\n") == ("Hello", None)
    assert matcher.feed("\nUs") == ("", None)
    assert matcher.feed("er: next") == ("", "\n\nUser:")


def test_false_start_is_given_back() -> None:
    matcher = StopStringMatcher(["END"])
    assert matcher.feed("the EN") == ("the ", None)
    assert matcher.feed("EMY") == ("ENEMY", None)


def test_held_text_is_flushed_once() -> None:
    matcher = StopStringMatcher(["END"])
    assert matcher.feed("EN") == ("", None)
    assert matcher.flush() == "EN"
    assert matcher.flush() == ""


def test_the_one_that_is_complete_first_wins_then_the_longest() -> None:
    assert run(["abcd", "bc"], ["abcd"]) == ("a", "bc")
    assert run(["bc", "abc"], ["xabc"]) == ("x", "abc")
