"""Encodes events of the prefix cache as messages of `scheduler.proto`."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

from scheduler_svc.block_watch import BlockEvent, Removed
from scheduler_svc.core.blocks.cache_listener import StoredBlock
from shared.pb import scheduler_pb2 as pb

_EVENTS_AT_ONCE = 512  # in a message


def snapshot_parts(blocks: Seq[StoredBlock]) -> Iterator[pb.BlockEvents]:
    """Yields the messages, at least one, that hold all stored blocks. Each is made when it is
    needed."""
    count = max(-(-len(blocks) // _EVENTS_AT_ONCE), 1)
    for index, message in enumerate(event_messages(blocks)):
        part = pb.SnapshotPart(index=index, count=count, blocks=len(blocks))
        message.snapshot.CopyFrom(part)
        yield message


def event_messages(events: Seq[BlockEvent]) -> Iterator[pb.BlockEvents]:
    """Yields the messages, at least one, that hold the events."""
    for start in range(0, max(len(events), 1), _EVENTS_AT_ONCE):
        yield pb.BlockEvents(events=map(_message, events[start : start + _EVENTS_AT_ONCE]))


def _message(event: BlockEvent) -> pb.BlockEvent:
    if isinstance(event, StoredBlock):
        stored = pb.StoredBlock(
            name=event.name,
            parent=event.parent or b"",
            token_ids=event.token_ids,
            cache_salt=event.cache_salt,
        )
        return pb.BlockEvent(stored=stored)
    if isinstance(event, Removed):
        return pb.BlockEvent(removed=event.name)
    return pb.BlockEvent(cleared=True)
