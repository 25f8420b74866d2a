"""Computes a fingerprint of all bytes of a model's files. Each weight file is hashed once per host,
because its digest is kept in the user's cache directory."""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import structlog
import xxhash

from worker_svc.errors import ModelError
from worker_svc.user_cache import cache_folder, private_file, private_folder, state_of
from worker_svc.weights.files import weight_files
from worker_svc.weights.shards import INDEX

log = structlog.get_logger(__name__)

_PIECE_BYTES = 1 << 20
_HEX_DIGITS = 32
# A file that has just changed may change again without getting a new time. The clocks of most file
# systems tick every few milliseconds, and some tick every two seconds.
_SETTLED_NS = 2_000_000_000
_KEPT = 1024  # the maximum number of digests, of a hundred bytes each


class ModelFiles:
    """The state of a model's config.json, index and weight files when the object is made.

    `fingerprint` is a hex digest of config.json, of the index of the weight files if there is one,
    which decides which tensors are read, and of the name and all bytes of every weight file.
    It is equal on all hosts and ranks that have equal files.
    """

    def __init__(self, model_dir: Path) -> None:
        """Computes the fingerprint.

        Raises:
            ModelError: as `weight_files`, or a file cannot be read.
        """
        self._model_dir = model_dir
        self._states = file_states(model_files(self._model_dir))
        self.fingerprint = self._read_fingerprint()

    def check_unchanged(self) -> None:
        """Checks that the files have not changed, so that all bytes read since fit the fingerprint.

        Raises:
            ModelError: a file has changed.
        """
        changed = file_states(model_files(self._model_dir)) != self._states
        if changed and self._read_fingerprint() != self.fingerprint:
            raise ModelError(f"model: {self._model_dir} changed while it was loaded; start again")

    def _read_fingerprint(self) -> str:
        digest = hashlib.sha256()
        for path in _config_files(self._model_dir):
            digest.update(path.read_bytes())
        with _kept_digests() as folder:
            for path in weight_files(self._model_dir):
                digest.update(os.fsencode(f"{path.name} {_file_digest(path, folder)} "))
        return digest.hexdigest()[:_HEX_DIGITS]


def model_files(model_dir: Path) -> list[Path]:
    """A model's config.json, index and weight files.

    Raises:
        ModelError: as `weight_files`.
    """
    return [*_config_files(model_dir), *weight_files(model_dir)]


def _config_files(model_dir: Path) -> list[Path]:
    """The files that say what the weights are and which file holds them."""
    index = model_dir / INDEX
    return [model_dir / "config.json", *([index] if index.is_file() else [])]


def file_states(paths: Iterable[Path]) -> list[tuple[str, str]]:
    """The names and states of files. A file that changes gets another state."""
    return [(path.name, state_of(path.stat())) for path in paths]


def _file_digest(path: Path, folder: int | None) -> str:
    """The XXH3-128 of a file's bytes, kept in `folder` with the file's path and state."""
    place = path.resolve()
    try:
        with place.open("rb", buffering=0) as file, _kept_digest(place, folder) as kept:
            status = os.fstat(file.fileno())
            state = os.fsencode(f" {state_of(status)} {place}\n")
            if kept is not None and (known := _recall(kept, state)):
                return known
            settled = kept is not None and _now(kept) - status.st_ctime_ns > _SETTLED_NS
            began = time.perf_counter()
            digest = _hash(file)
            taken = round(time.perf_counter() - began, 3)
            log.info("weights hashed", path=str(path), bytes=status.st_size, seconds=taken)
            if (
                kept is not None
                and settled
                and state_of(os.fstat(file.fileno())) == state_of(status)
            ):
                _remember(kept, _record(digest, state))
            return digest
    except OSError as error:
        raise ModelError(f"{path.name}: cannot be read: {error}") from error


def _hash(file: BinaryIO) -> str:
    """The XXH3-128 of a file, which is read and not mapped. Mapping would reach 20 instead of 5
    GB/s, but a mapped file that is truncated ends the process. Reading and hashing release Python's
    lock."""
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(_PIECE_BYTES))
    while size := file.readinto(buffer):  # type: ignore[attr-defined]
        digest.update(buffer[:size])
    return digest.hexdigest()


@contextmanager
def _kept_digests() -> Iterator[int | None]:
    """Opens the folder of digests, if it can be used."""
    with ExitStack() as stack:
        folder = None
        try:
            path = cache_folder("digests")
            folder = stack.enter_context(private_folder(path, create=True))
        except OSError as error:
            log.warning("weight digests are not kept; each start hashes again", reason=str(error))
        yield folder


@contextmanager
def _kept_digest(place: Path, folder: int | None) -> Iterator[int | None]:
    """Opens and locks the file in `folder` that keeps the digest of the file at `place`, if it can
    be used. So other ranks wait until the first rank has hashed the file."""
    if folder is None:
        yield None
        return
    name = hashlib.sha256(os.fsencode(place)).hexdigest()[:_HEX_DIGITS]
    with ExitStack() as stack:
        try:
            file = private_file(folder, name, os.O_RDWR | os.O_CREAT)
            kept = stack.enter_context(file)
            fcntl.flock(kept, fcntl.LOCK_EX)
            _drop_old(folder)
        except OSError as error:
            log.warning("weight digest is not kept; the next start hashes again", reason=str(error))
            yield None
            return
        try:
            yield kept
        finally:
            if not os.fstat(kept).st_size:
                with suppress(OSError):
                    os.unlink(name, dir_fd=folder)


def _recall(kept: int, state: bytes) -> str | None:
    try:
        text = os.pread(kept, len(_record("", state)) + _HEX_DIGITS + 1, 0)
        os.utime(kept)  # digests used last are dropped last
    except OSError as error:
        log.warning("weight digest cannot be read; hashing again", reason=str(error))
        return None
    digest = text[:_HEX_DIGITS].decode("ascii", "replace")
    return digest if text == _record(digest, state) else None


def _record(digest: str, state: bytes) -> bytes:
    """The text that is kept of a file. Its last digits show whether a bad disk has changed it."""
    text = digest.encode() + state
    return text + xxhash.xxh3_64_hexdigest(text).encode()


def _now(kept: int) -> int:
    """The time in nanoseconds on the clock of a file system."""
    os.utime(kept)
    return os.fstat(kept).st_mtime_ns


def _remember(kept: int, text: bytes) -> None:
    try:
        os.ftruncate(kept, 0)
        os.pwrite(kept, text, 0)
    except OSError as error:
        log.warning("weight digest is not kept; the next start hashes again", reason=str(error))


def _drop_old(folder: int) -> None:
    names = os.listdir(folder)
    if len(names) > _KEPT:
        names.sort(key=lambda name: os.stat(name, dir_fd=folder).st_mtime)
        for name in names[:-_KEPT]:
            os.unlink(name, dir_fd=folder)
