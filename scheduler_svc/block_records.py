"""Records of the published blocks, which outlive the forks of a scheduler.

Workers keep their cache when a scheduler dies. The records tell its successor which blocks hold
what. They lie in memory files of the parent process, see `shared.process.kept`.

A block's record is written when the block is published, and erased before a step is sent that may
write to the block. So each valid record is true once the steps in flight have ended. The record is
valid if its checksum is. That covers the block's number and a random generation, so that a new
generation erases all records at once.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from struct import Struct

import structlog
import xxhash

from scheduler_svc.core.blocks.block_manager import BlockManager
from scheduler_svc.core.blocks.block_names import new_key
from scheduler_svc.core.blocks.cache_listener import CacheListener, StoredBlock
from shared.paging import Paging
from shared.process.kept import KeptObject, kept_file, may_have_damaged

log = structlog.get_logger(__name__)

MAX_SALT_BYTES = 63  # blocks with a longer salt are not recorded
_CHECKSUM_BYTES = 8
# After the checksum: the number of records written before, name, parent (zeros: none), the bytes
# of the salt, the salt, the bytes of the tokens. Tokens follow, an int32[block_size] or nothing.
_HEAD = Struct(f"<Q16s16sB{MAX_SALT_BYTES}sI")
_NO_PARENT, _NO_CHECKSUM = bytes(16), bytes(_CHECKSUM_BYTES)


@dataclass(frozen=True)
class RecordedCache:
    """The cache to which the records belong."""

    ids: Sequence[str]  # by rank, see `worker.proto`
    num_blocks: int
    paging: Paging
    model_fingerprint: str


@dataclass(frozen=True)
class _Header:
    cache: RecordedCache
    key: bytes  # of names with a salt
    generation: int


class BlockRecords(CacheListener):
    """The parent process makes the object; each scheduler uses it in turn.

    A scheduler calls `begin` unless the workers still have the `cache` that the records describe.
    Then it calls `block_manager`.
    """

    def __init__(self) -> None:
        self._file = kept_file("blocks")
        self._kept = KeptObject("blocks-header")
        self._memory: mmap.mmap
        self._size = self._generation = self._num_written = 0

    def fork_ended(self, status: int) -> None:
        """Forgets the records if what ended the scheduler may have damaged them."""
        if may_have_damaged(status):
            self._kept.clear()

    @property
    def cache(self) -> RecordedCache | None:
        header = self._header()
        return header.cache if header else None

    def begin(self, cache: RecordedCache) -> None:
        """Erases all records; those to come belong to this cache. The names' key stays."""
        found = self._header()
        self._kept.clear()
        try:
            os.ftruncate(self._file, cache.num_blocks * _record_bytes(cache.paging))
            self._write(cache, found.key if found else new_key())
        except OSError as error:  # a limit on the size of files
            log.warning("names of blocks do not outlive this process", reason=str(error))

    def block_manager(self, num_blocks: int, paging: Paging) -> BlockManager:
        """Makes a manager of the `cache`, which has this size. The recorded blocks are cached, and
        those that it publishes are recorded."""
        header = self._header()
        self._size = _record_bytes(paging)
        file = self._file if header else -1
        self._memory = mmap.mmap(file, num_blocks * self._size)
        self._generation = header.generation if header else 0
        key = header.key if header else None
        blocks = BlockManager(num_blocks, paging, key, self._read(header))
        blocks.listeners.append(self)
        return blocks

    def stored(self, block: int, content: StoredBlock) -> None:
        name, parent, tokens, text = content
        salt = text.encode()
        if len(salt) > MAX_SALT_BYTES:
            return
        head = self._num_written, name, parent or _NO_PARENT, len(salt), salt, len(tokens)
        self._num_written += 1
        body, begin = _HEAD.pack(*head) + tokens, block * self._size
        body = body.ljust(self._size - _CHECKSUM_BYTES, b"\0")
        self._memory[begin + _CHECKSUM_BYTES : begin + self._size] = body
        self._memory[begin : begin + _CHECKSUM_BYTES] = self._checksum(block, body)

    def removed(self, block: int, content: StoredBlock) -> None:
        begin = block * self._size
        self._memory[begin : begin + _CHECKSUM_BYTES] = _NO_CHECKSUM

    def cleared(self) -> None:
        if header := self._header():
            self._write(header.cache, header.key)

    def _read(self, header: _Header | None) -> list[tuple[int, StoredBlock]]:
        """Returns the recorded blocks in the order in which they were published."""
        found = []
        for block in range(header.cache.num_blocks if header else 0):
            # A read from the mapping would allocate memory for what was never written.
            record = os.pread(self._file, self._size, block * self._size)
            checksum, body = record[:_CHECKSUM_BYTES], record[_CHECKSUM_BYTES:]
            if checksum == _NO_CHECKSUM or checksum != self._checksum(block, body):
                continue
            number, name, parent, salt_bytes, salt, token_bytes = _HEAD.unpack_from(body)
            tokens, text = body[_HEAD.size :][:token_bytes], salt[:salt_bytes].decode()
            stored = StoredBlock(name, None if parent == _NO_PARENT else parent, tokens, text)
            found.append((number, block, stored))
        found.sort(key=lambda each: each[0])
        self._num_written = found[-1][0] + 1 if found else 0
        return [(block, stored) for _, block, stored in found]

    def _checksum(self, block: int, body: bytes) -> bytes:
        return xxhash.xxh3_64_digest(body, self._generation ^ block)

    def _header(self) -> _Header | None:
        found = self._kept.read()
        if found is None:
            return None
        key = bytes.fromhex(found["key"])
        cache = {**found["cache"], "paging": Paging(**found["cache"]["paging"])}
        return _Header(RecordedCache(**cache), key, found["generation"])

    def _write(self, cache: RecordedCache, key: bytes) -> None:
        """Writes a header with a new generation."""
        self._generation = secrets.randbits(64)
        self._kept.write({"cache": asdict(cache), "key": key.hex(), "generation": self._generation})


def _record_bytes(paging: Paging) -> int:
    return _CHECKSUM_BYTES + _HEAD.size + 4 * paging.block_size
