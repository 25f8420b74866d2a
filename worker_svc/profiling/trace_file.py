"""A Chrome trace on disk that is written in pieces."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

from shared.errors import FailedPreconditionError

_EVENTS = b'"traceEvents": ['


class TraceFile:
    """A compressed trace, which appears at `path` once it is complete.

    Pieces are spliced as bytes, because parsing would hold Python's lock while steps need it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._piece = path.with_suffix(".piece")
        self._part = path.with_suffix(".part")
        # Level 1, because serving needs the processor.
        self._file = gzip.GzipFile(self._part, "wb", compresslevel=1)
        self._separator = b""  # before the next piece's events
        self._error: OSError | None = None

    def add(self, export: Callable[[str], object]) -> None:
        """Adds the events of the trace that `export` writes to a path. `finish` raises errors."""
        if self._error is not None:
            return
        try:
            export(str(self._piece))
            piece = self._piece.read_bytes()
            self._piece.unlink()
            events = piece.index(_EVENTS) + len(_EVENTS)
            end = piece.rindex(b"]", events, piece.rindex(b'"traceName"'))
            self._file.write(self._separator or piece[:events])
            self._file.write(piece[events:end])
            self._separator = b","
        except OSError as error:
            self._error = error
        except ValueError:  # torch reports no error when it cannot write
            self._error = OSError("a trace was cut short; is the disk full?")

    def finish(self) -> Path:
        """Completes the trace -> its path.

        Raises:
            FailedPreconditionError: the trace could not be written.
        """
        try:
            if self._error is not None:
                raise self._error
            self._file.write(b"]}")
            self._file.close()
            self._part.rename(self.path)
        except OSError as error:
            for leftover in (self._piece, self._part):
                leftover.unlink(missing_ok=True)
            raise FailedPreconditionError(f"profile_directory: {error}") from error
        return self.path
