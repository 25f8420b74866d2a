"""Names of full blocks, which stand for their tokens and for all tokens before them.

Following vLLM's automatic prefix caching, a name is a hash of the block's tokens chained with the
name of the block before it. The first block is chained with the number of its table and the
sequence's cache salt, so that only requests with that salt share its prefixes. Hashes are BLAKE2b
(RFC 7693) of 128 bits, at which no collision is expected in the life of a cluster.

Names without a salt are equal in all processes, because a tier under the cache outlives them. Names
with a salt depend on a random key, so that nobody can find out what another salt's blocks hold.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable
from itertools import chain

from scheduler_svc.core.sequence import Sequence
from shared.paging import Paging, TableKind

NAME_BYTES = 16


class BlockNames:
    """Names the blocks of sequences. `key` is that of names with a salt."""

    def __init__(self, paging: Paging, key: bytes | None = None) -> None:
        self._paging = paging
        # Copied for each hash: making a new object takes half as long again.
        self._plain = hashlib.blake2b(digest_size=NAME_BYTES)
        self._keyed = hashlib.blake2b(key=key or new_key(), digest_size=NAME_BYTES)

    def extend(self, seq: Sequence, number: int, num_blocks: int) -> None:
        """Names the first `num_blocks` blocks of a table of the sequence."""
        salt, names = seq.request.cache_salt.encode(), seq.blocks.names[number]
        for i in range(len(names), num_blocks):
            parent = names[i - 1] if i else self._hash(bytes([number]) + salt, salt)
            names.append(self._hash(parent + self.tokens(seq, number, i), salt))

    def match(
        self, seq: Sequence, kinds: Iterable[TableKind], is_found: Callable[[bytes], bool]
    ) -> int:
        """The number of leading tokens whose blocks are found by their names, as far as later
        tokens see them. Names these blocks."""
        seq.blocks.names = seq.blocks.names or [[] for _ in self._paging.tables]
        num_tokens, size = seq.num_cacheable_tokens, self._paging.slots_per_block
        for number, kind in enumerate(kinds):
            block_size = kind.block_size
            if kind.window:
                num_tokens -= num_tokens % size
                i = num_tokens // block_size
                while i > kind.first_needed(num_tokens):
                    i -= 1
                    if not is_found(self._name(seq, number, i)):
                        num_tokens = i * block_size // size * size
                        i = num_tokens // block_size
            else:
                i, end = 0, num_tokens // block_size
                while i < end and is_found(self._name(seq, number, i)):
                    i += 1
                num_tokens = i * block_size
        return num_tokens

    def all_of(self, seq: Sequence) -> list[bytes]:
        """The names of all blocks, of all tables, that the sequence's tokens fill."""
        for number, kind in enumerate(self._paging.tables):
            self.extend(seq, number, seq.num_tokens // kind.block_size)
        return [*chain(*seq.blocks.names)]

    def tokens(self, seq: Sequence, number: int, i: int) -> bytes:
        """The tokens of block `i` of a table of the sequence, int32[block_size]."""
        size = self._paging.tables[number].block_size
        return seq.tokens[i * size : (i + 1) * size].tobytes()

    def _name(self, seq: Sequence, number: int, i: int) -> bytes:
        self.extend(seq, number, i + 1)
        return seq.blocks.names[number][i]

    def _hash(self, data: bytes, salt: bytes) -> bytes:
        hashed = (self._keyed if salt else self._plain).copy()
        hashed.update(data)
        return hashed.digest()


def new_key() -> bytes:
    """A random key for names with a salt."""
    return secrets.token_bytes(32)
