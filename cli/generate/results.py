"""The output of a batch: a line of JSON for each request, written once it is complete."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from cli.errors import CommandError

_BEGINNING = b'{"id": '


class Results:
    """The file `path`, which may have lines of an earlier, interrupted run.

    Failures go to another file beside it, which each run replaces, because it retries them.

    Raises:
        CommandError: the file is not an output of generate, or another process is writing it.
    """

    def __init__(self, path: Path) -> None:
        self.failures_path = path.with_suffix(f".errors{path.suffix}")
        self.done: set[str | int] = set()
        try:
            self._file = path.open("ab")
        except OSError as error:
            raise CommandError(f"{path}: {error.strerror}") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read(path)
            self.failures_path.unlink(missing_ok=True)
        except BlockingIOError as error:
            self._file.close()
            raise CommandError(f"{path}: another process is writing it") from error
        except (ValueError, LookupError, TypeError) as error:
            self._file.close()
            raise CommandError(f"{path}: not an output of generate; choose another file") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def add(self, line_id: str | int, result: Mapping[str, Any]) -> None:
        self._file.write(_encode({"id": line_id, **result}))
        self._file.flush()
        self.done.add(line_id)

    def fail(self, line_id: str | int, number: int, error: str) -> None:
        with self.failures_path.open("ab") as file:
            file.write(_encode({"id": line_id, "line": number, "error": error}))

    def _read(self, path: Path) -> None:
        """Reads which lines are done, and cuts off half a line that a killed run has left."""
        end = 0
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    self.done.add(json.loads(line)["id"])
                    end += len(line)
                elif not line.startswith(_BEGINNING[: len(line)]):
                    raise ValueError("not a line of generate")
        self._file.truncate(end)


def _encode(record: Mapping[str, Any]) -> bytes:
    """Returns a line that begins with `_BEGINNING`."""
    text = json.dumps(record, ensure_ascii=False)
    return text.encode(errors="backslashreplace") + b"\n"  # JSON may have half a surrogate pair
