"""Finds stop strings in text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopStringMatcher:
    """Passes text through until a stop string is complete, holding back what may begin one.

    The stop string whose last character comes first is the one found; of several that end there,
    the longest. So the result does not depend on how the text is cut into pieces. One
    Knuth-Morris-Pratt automaton per stop string: a step per character and stop string.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        """`stops`: what to look for, none of them empty; `include`: the one found is text, too."""
        # Longest first: of matches that end at the same character the first one looked at is kept.
        self._stops = sorted(set(stops), key=lambda stop: (-len(stop), stop))
        self._failures = [_failure_function(stop) for stop in self._stops]
        self._first_characters = frozenset(stop[0] for stop in self._stops)
        self._matched = [0] * len(self._stops)  # characters of each stop string matched so far
        self._longest = 0  # of these
        self._held = ""
        self._include = include

    def feed(self, text: str, *, ignore: bool = False) -> tuple[str, str | None]:
        """Takes the next piece. With `ignore`, stop strings complete in it are text as any other.

        Returns:
            The text that is free to go, and the stop string if one is complete: then the text ends
            before it, or with it, and nothing may be fed any more.
        """
        if not self._longest and self._first_characters.isdisjoint(text):
            return text, None
        buffer = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            found = self._step(character)
            if found is not None and not ignore:
                self._held = ""
                return buffer[: position if self._include else position - len(found)], found
        self._longest = max(self._matched)
        free = len(buffer) if self._include else len(buffer) - self._longest
        self._held = buffer[free:]
        return buffer[:free], None

    def flush(self) -> str:
        """The text still held back, when no more will come."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> str | None:
        found = None
        for index, stop in enumerate(self._stops):
            matched = self._matched[index]
            while matched and stop[matched] != character:
                matched = self._failures[index][matched - 1]
            matched += stop[matched] == character
            if matched == len(stop):
                found = found or stop
                matched = self._failures[index][-1]
            self._matched[index] = matched
        return found


def _failure_function(pattern: str) -> list[int]:
    """For each prefix of `pattern`, the length of its longest border."""
    failure = [0] * len(pattern)
    matched = 0
    for index in range(1, len(pattern)):
        while matched and pattern[matched] != pattern[index]:
            matched = failure[matched - 1]
        matched += pattern[matched] == pattern[index]
        failure[index] = matched
    return failure
