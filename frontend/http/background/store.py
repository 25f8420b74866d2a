"""Files of background responses, from which any frontend of this host continues a response.

A file has the request as JSON, then lines that are appended: lists of token ids, and at last an
object that says how the response ended. Lines after the end have no meaning. A line begins with its
line break, and is complete with its last bracket. So a line that was cut off, because its process
died or the disk was full, is no JSON; it has no meaning, either, and cannot harm the next line.
The process that generates the tokens holds the file's lock (flock(2)), which ends with it. An ended
file has no permission to write, so that a listing tells it from others.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from shared.errors import UnavailableError

MAX_RESPONSES = 1024  # of a directory
MAX_RESPONSES_BYTES = 1 << 30  # of a directory
MAX_AGE_S = 24 * 3600.0  # since the last token
_ID = re.compile("resp_[0-9a-f]{32}")
_NAME = re.compile(rf"\.?[0-9a-f]{{16}}-{_ID.pattern}")  # with a dot until it is complete


class StoredResponse:
    """A response's file. Anybody may read and end it; the holder of its lock adds tokens."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._read_to = 0  # bytes; a line that is not complete is read again
        self.header: dict[str, Any] = {}
        self.tokens: list[int] = []
        self.end: dict[str, Any] | None = None

    @property
    def id(self) -> str:
        return self.path.name.partition("-")[2]

    def refresh(self) -> None:
        """Reads the lines that were appended since the last call. A deleted response has ended."""
        if self.end is not None:
            return
        status = os.fstat(self._descriptor)
        piece = os.pread(self._descriptor, status.st_size - self._read_to, self._read_to)
        *lines, last = piece.split(b"\n")
        for line in lines:
            self._take(line)
        self._read_to += len(piece) if self._take(last) else len(piece) - len(last)
        if status.st_nlink == 0 and self.end is None:
            self.end = {"end": "cancelled"}

    def _take(self, line: bytes) -> bool:
        """Returns whether the line is complete."""
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError:
            return False
        if not self.header:
            self.header = value
        elif self.end is not None:
            pass
        elif isinstance(value, list):
            self.tokens += value
        else:
            self.end = value
        return True

    def lock(self) -> bool:
        """Takes the lock if it is free, and then reads the file to its end."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self.refresh()
        return True

    def append(self, token_ids: Sequence[int]) -> None:
        """Adds tokens, unless the response has been ended meanwhile.

        Raises:
            OSError: the disk is full.
        """
        self.refresh()
        if self.end is None:
            self.write_line(orjson.dumps(list(token_ids)))

    def finish(self, end: dict[str, Any]) -> None:
        """Ends the response, unless it has ended.

        Raises:
            OSError: the disk is full.
        """
        self.refresh()
        if self.end is None:
            self.write_line(orjson.dumps(end))
        self.mark_ended()

    def mark_ended(self) -> None:
        os.fchmod(self._descriptor, stat.S_IRUSR)

    def write_line(self, value: bytes) -> None:
        """Raises OSError if the disk is full."""
        if os.write(self._descriptor, b"\n" + value) <= len(value):
            raise OSError("no space left for a response")
        self.refresh()

    def delete(self) -> None:
        self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Closes the file, and gives up its lock."""
        os.close(self._descriptor)


class ResponseStore:
    """The responses in a directory, which frontends of one host share.

    Clients cannot see each other's responses: a file's name contains its client's.
    """

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)

    def create(self, owner: str, response_id: str, header: dict[str, Any]) -> StoredResponse:
        """Stores a new response, whose lock the caller gets.

        Raises:
            UnavailableError: there is no room.
        """
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            text = orjson.dumps(header)
            self._make_room(len(text))
            path = self._path(owner, response_id)
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            # Others see the file once it has its lock and its request.
            draft = path.with_name(f".{path.name}")
            found = StoredResponse(path, os.open(draft, flags, 0o600))
            try:
                found.lock()
                found.write_line(text)
                os.rename(draft, path)
            except OSError:
                draft.unlink(missing_ok=True)
                found.close()
                raise
        except OSError as error:
            reason = error.strerror or str(error)
            raise UnavailableError(f"background: cannot store the response: {reason}") from error
        return found

    def open(self, owner: str, response_id: str) -> StoredResponse | None:
        """Finds a client's response, and reads it."""
        if not _ID.fullmatch(response_id):
            return None
        found = self._open(self._path(owner, response_id))
        if found:
            found.refresh()
        return found

    def unfinished(self) -> Iterator[StoredResponse]:
        """Locks and yields the responses that nobody generates. The caller closes them."""
        for path, status in self._files():
            if _has_ended(status) or path.name.startswith("."):
                continue
            found = self._open(path)
            if found is None:
                continue
            if found.lock():
                if found.end is None:
                    yield found
                    continue
                found.mark_ended()  # its frontend died before
            found.close()

    def delete_older_than(self, time_s: float) -> None:
        """Deletes responses that were not written to since then, in seconds since 1970."""
        for path, status in self._files():
            if status.st_mtime < time_s:
                path.unlink(missing_ok=True)

    def _open(self, path: Path) -> StoredResponse | None:
        # Only root may open a response to write that has ended.
        for access in (os.O_RDWR | os.O_APPEND, os.O_RDONLY):
            with suppress(FileNotFoundError, PermissionError):
                return StoredResponse(path, os.open(path, access | os.O_CLOEXEC))
        return None

    def _path(self, owner: str, response_id: str) -> Path:
        digest = hashlib.sha256(owner.encode()).hexdigest()[:16]
        return self._directory / f"{digest}-{response_id}"

    def _files(self) -> list[tuple[Path, os.stat_result]]:
        """The responses' files. Other files in the directory are left alone."""
        found = []
        with suppress(FileNotFoundError):
            for name in filter(_NAME.fullmatch, os.listdir(self._directory)):
                with suppress(FileNotFoundError):
                    path = self._directory / name
                    found.append((path, path.stat()))
        return found

    def _make_room(self, size: int) -> None:
        """Deletes ended responses until there is room: the oldest of the client that has most.

        Raises:
            UnavailableError: there is no room.
        """
        files = dict(self._files())
        counts = Counter(_owner(path) for path in files)
        total = size + sum(status.st_size for status in files.values())
        while len(files) >= MAX_RESPONSES or total > MAX_RESPONSES_BYTES:
            ended = [path for path, status in files.items() if _has_ended(status)]
            if not ended:
                raise UnavailableError(
                    f"background: {len(files)} responses are stored; the limits are "
                    f"{MAX_RESPONSES} responses and {MAX_RESPONSES_BYTES} bytes"
                )
            oldest = min(ended, key=lambda path: (-counts[_owner(path)], files[path].st_mtime))
            oldest.unlink(missing_ok=True)
            counts[_owner(oldest)] -= 1
            total -= files.pop(oldest).st_size


def _owner(path: Path) -> str:
    return path.name.partition("-")[0]


def _has_ended(status: os.stat_result) -> bool:
    return not status.st_mode & stat.S_IWUSR
