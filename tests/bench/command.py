"""A benchmark's command line, called in this process."""

from __future__ import annotations

from collections.abc import Callable


def status(main: Callable[[list[str]], int], words: list[str]) -> object:
    """Its exit status, 2 if the words cannot be parsed."""
    try:
        return main(words)
    except SystemExit as end:
        return end.code
