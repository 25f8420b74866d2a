"""A directory with a file for each block that it holds, which only this user can read.

A file has a digest, then the block's bytes. The digest covers the name and the bytes. A file is
written aside and renamed, and it is checked when it is read. So a file that is damaged, cut off,
renamed or foreign counts as missing, and it is deleted.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import time
from collections import deque
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from worker_svc.user_cache import private_file, private_folder

_DIGEST_BYTES = 16
_NAME_DIGITS = 32  # of a block's name, in hex
_UNFINISHED = ".new"
_MAX_WAIT_S, _POLL_S = 10.0, 0.02
_SAME_TIME_NS = 60 * 10**9
_MAX_CAPACITY = (1 << 31) - 1  # an int32 in `worker.proto`
# Errors of `open` that mean that a file is foreign: a link, a folder, or of another user.
_FOREIGN = (errno.ELOOP, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ENXIO)

Bytes = npt.NDArray[np.uint8]


class BlockDirectory:
    """The blocks of one rank in a folder of `root`. Call `find` first. Any thread may call `load`,
    and one thread the other methods.

    Args:
        root: made if it is missing. No other process may use it. Its other folders are of blocks
            that this rank cannot use, and their oldest files are deleted if space is short.
        key: names all that the bytes of a block depend on, except its tokens.
        block_bytes: the size of a block.
        max_bytes: the size of all files in `root`.

    Raises:
        PermissionError: a folder belongs to another user, or other users may write to it.
        OSError: a folder cannot be made or read.
    """

    def __init__(self, root: Path, key: str, block_bytes: int, max_bytes: int) -> None:
        self._salt = hashlib.sha256(key.encode()).digest()
        folder = root / self._salt.hex()[:_NAME_DIGITS]
        self._file_bytes = _DIGEST_BYTES + block_bytes
        self.capacity = min(max_bytes // self._file_bytes, _MAX_CAPACITY)
        with ExitStack() as stack:
            self._lock = stack.enter_context(private_folder(root, create=True))
            self._folder = stack.enter_context(private_folder(folder, create=True))
            self.close = stack.pop_all().close
        self._root, self._own = root, folder
        self._max_bytes = max_bytes
        self._names: dict[bytes, None] | None = None  # once they are known
        # Files of other folders, the oldest first, and their sizes.
        self._foreign: deque[tuple[Path, int]] = deque()
        self._foreign_bytes = 0

    def find(self) -> list[bytes]:
        """Finds the files -> the names of all blocks, the one used least recently first. Deletes
        files that are not blocks. Waits for the end of a process that used `root` before.

        Raises:
            OSError: the disk fails, or that process does not end.
        """
        if self._names is not None:
            return [*self._names]
        deadline = time.monotonic() + _MAX_WAIT_S
        while not self._locked():
            if time.monotonic() > deadline:
                raise BlockingIOError(f"another process uses {self._root}")
            time.sleep(_POLL_S)
        others = [each for each in self._root.glob("*/*") if each.parent != self._own]
        states = [(each.lstat(), each) for each in others]
        states.sort(key=lambda each: each[0].st_mtime)
        self._foreign = deque((path, state.st_size) for state, path in states)
        self._foreign_bytes = sum(state.st_size for state, _ in states)
        found = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if _is_name(entry.name):
                    time_ns = entry.stat(follow_symlinks=False).st_mtime_ns
                    # Of those used at about the same time, the ends of prefixes leave first.
                    found.append((time_ns // _SAME_TIME_NS, -time_ns, entry.name))
                else:
                    self._delete(entry.name)
        self._names = {bytes.fromhex(name): None for *_, name in sorted(found)}
        return [*self._names]

    def save(self, name: bytes, data: Bytes) -> None:
        """Writes a block's bytes.

        Raises:
            OSError: the file cannot be written.
        """
        assert self._names is not None
        self._names[name] = None
        self._make_room(self._max_bytes - len(self._names) * self._file_bytes)
        aside = name.hex() + _UNFINISHED
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            with private_file(self._folder, aside, flags) as file:
                content = self._digest(name, data) + data.tobytes()
                written = 0
                while written < len(content):  # a part at a time if a signal comes
                    written += os.write(file, content[written:])
            folder = self._folder
            os.replace(aside, name.hex(), src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            with suppress(OSError):
                os.unlink(aside, dir_fd=self._folder)
            raise

    def load(self, name: bytes, data: Bytes) -> bool:
        """Reads a block's bytes into `data` -> whether they are what was saved.

        Raises:
            OSError: the disk fails.
        """
        digest = bytearray(_DIGEST_BYTES)
        try:
            with private_file(self._folder, name.hex()) as file:
                size = os.fstat(file).st_size
                read = os.preadv(file, [digest, data.data], 0) if size == self._file_bytes else 0
                if read == size == self._file_bytes and digest == self._digest(name, data):
                    os.utime(file)  # files used last are deleted last
                    return True
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno is not None and error.errno not in _FOREIGN:
                raise
        self._delete(name.hex())
        return False

    def erase(self, names: Iterable[bytes]) -> None:
        """Deletes blocks, as far as the directory has them."""
        for name in names:
            if self._names:
                self._names.pop(name, None)
            self._delete(name.hex())

    def _locked(self) -> bool:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _digest(self, name: bytes, data: Bytes) -> bytes:
        hashed = xxhash.xxh3_128(self._salt + name)
        hashed.update(data.data)
        return hashed.digest()

    def _delete(self, name: str) -> None:
        with suppress(OSError):  # a folder, or another process was faster
            os.unlink(name, dir_fd=self._folder)

    def _make_room(self, num_bytes: int) -> None:
        """Deletes files of other folders, until they have only so many bytes."""
        while self._foreign and self._foreign_bytes > num_bytes:
            path, size = self._foreign.popleft()
            self._foreign_bytes -= size
            with suppress(OSError):
                path.unlink()


def _is_name(text: str) -> bool:
    return len(text) == _NAME_DIGITS and all(digit in "0123456789abcdef" for digit in text)
