"""Published blocks, and the interface of objects that follow the contents of the prefix cache."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class StoredBlock(NamedTuple):
    """A published block. `parent` is the name of the block before it, None for a prompt's first."""

    name: bytes
    parent: bytes | None
    token_ids: bytes  # int32[block_size], or empty if it is not of a first table
    cache_salt: str


class CacheListener(Protocol):
    """Receives each change, before a step is planned that may write to a removed block."""

    def stored(self, block: int, content: StoredBlock) -> None:
        """This block holds a published content."""

    def removed(self, block: int, content: StoredBlock) -> None:
        """This block has lost that content."""

    def cleared(self) -> None:
        """All blocks have lost their contents."""
