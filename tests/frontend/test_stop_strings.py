"""Stop strings, checked against a search of the whole text."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.text.stop_strings import StopStringMatcher
from shared.sampling_params import MAX_ITEMS, MAX_STOP_LENGTH

# é, 你 and 👍 have two, three and four bytes; like 你, € has three.
ALPHABET = "ab c\u00e9\u4f60\u20ac\U0001f44d"
PIECES = st.lists(st.text(ALPHABET, max_size=5), max_size=12)
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=4)


@st.composite
def near_matches(draw: st.DrawFn) -> tuple[list[str], list[str]]:
    """Draws stop strings up to the limits, and pieces of a text full of near matches."""
    character = draw(st.sampled_from("a\u4f60\U0001f44d"))
    length = draw(st.sampled_from([4, 60, MAX_STOP_LENGTH]))
    other = draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=MAX_ITEMS["stop"]))
    stops = [character * at + "b" + character * (length - 1 - at) for at in other]
    stops += [character * at + "b" for at in other]
    stops = stops[: MAX_ITEMS["stop"]]
    runs = draw(st.lists(st.integers(0, length + 2), max_size=5))
    text = "b".join(character * count for count in runs) + draw(st.sampled_from(["", "b", "c"]))
    cuts = draw(st.lists(st.integers(0, len(text)), max_size=40))
    bounds = sorted({0, *cuts, len(text)})
    return stops, [text[a:b] for a, b in itertools.pairwise(bounds)]


def run(
    stops: list[str], pieces: list[str], include: bool = False, ignored: int = 0
) -> tuple[str, str | None]:
    """Feeds the pieces to a matcher, ignoring stop strings in the first `ignored` ones."""
    matcher = StopStringMatcher(stops, include=include)
    free = ""
    for count, piece in enumerate(pieces, start=1):
        text, match = matcher.feed(piece, ignore=count <= ignored)
        free += text
        if match is not None:
            fed = "".join(pieces[: count - 1]) + piece[: match.end]
            assert fed == (free if include else free + match.stop)
            return free, match.stop
    return free + matcher.flush(), None


def search(
    stops: list[str], text: str, include: bool = False, ignored: int = 0
) -> tuple[str, str | None]:
    """Finds the first character that completes a stop string, and the longest that it completes.

    `ignored`: the number of characters at the start that do not count.
    """
    for end in range(ignored + 1, len(text) + 1):
        ending_here = [stop for stop in stops if text[:end].endswith(stop)]
        if ending_here:
            longest = max(ending_here, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@settings(max_examples=200)
@given(
    case=st.tuples(STOPS, PIECES) | near_matches(),
    include=st.booleans(),
    ignored=st.integers(0, 6),
)
def test_any_pieces_give_what_a_search_of_the_whole_gives(
    case: tuple[list[str], list[str]], include: bool, ignored: int
) -> None:
    stops, pieces = case
    ignored_text = len("".join(pieces[:ignored]))
    expected = search(stops, "".join(pieces), include, ignored_text)
    assert run(stops, pieces, include, ignored) == expected


@given(stops=STOPS, pieces=PIECES, include=st.booleans(), ignored=st.integers(0, 6))
def test_no_text_is_held_back_without_need(
    stops: list[str], pieces: list[str], include: bool, ignored: int
) -> None:
    """Where the stop string is shown, none is."""
    matcher = StopStringMatcher(stops, include=include)
    fed = free = ""
    for count, piece in enumerate(pieces, start=1):
        text, match = matcher.feed(piece, ignore=count <= ignored)
        if match is not None:
            return
        fed += piece
        free += text
        held = fed[len(free) :]
        assert fed.startswith(free)
        begun = (n for stop in stops for n in range(len(stop)) if fed.endswith(stop[:n]))
        assert len(held) == (0 if include else max(begun, default=0))


def test_held_text_is_flushed_once() -> None:
    matcher = StopStringMatcher(["END"])
    assert matcher.feed("EN") == ("", None)
    assert matcher.flush() == "EN"
    assert matcher.flush() == ""
