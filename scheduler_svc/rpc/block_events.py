"""Encodes events of the prefix cache as messages of `scheduler.proto`."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from itertools import islice

from scheduler_svc.block_watch import BlockEvent, Removed, Snapshot, StoredBlock
from shared.pb import scheduler_pb2 as pb

_EVENTS_AT_ONCE = 512  # in a message


def snapshot_parts(snapshot: Snapshot) -> Iterator[pb.BlockEvents]:
    """Yields the messages, at least one, that hold a snapshot. Each is made when it is needed."""
    total, blocks = len(snapshot), iter(snapshot)
    count = max(-(-total // _EVENTS_AT_ONCE), 1)
    for index in range(count):
        yield pb.BlockEvents(
            events=map(_message, islice(blocks, _EVENTS_AT_ONCE)),
            snapshot=pb.SnapshotPart(index=index, count=count, blocks=total),
        )


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
