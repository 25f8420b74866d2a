"""Translates the events of a scheduler's prefix cache into batches of `common.proto`."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

import numpy as np
from smg_grpc_proto.generated import common_pb2 as common

from frontend.api.vllm_engine.responses import cache_use
from shared.pb import scheduler_pb2

_DEVICE = common.KV_CACHE_TIER_DEVICE


class KvEventStream:
    """Builds the batches of one subscriber: a snapshot, then the changes.

    Batches are numbered from 1. A batch with only the load repeats the previous batch's number.
    """

    def __init__(self, info: scheduler_pb2.EngineInfo) -> None:
        self._info = info
        self._number = 0  # of the last batch
        self._num_events = self._num_loads = 0

    def batch(self, message: scheduler_pb2.BlockEvents) -> common.KvEventBatch:
        """The batch for a scheduler's next message. Pass every message, in order."""
        of_snapshot = message.HasField("snapshot")
        load_only = not (message.events or of_snapshot)
        self._number += not load_only
        batch = common.KvEventBatch(
            sequence_number=self._number,
            timestamp=datetime.now(UTC).timestamp(),
            dp_rank=0,
            load=self._load(message.load, load_only),
        )
        if of_snapshot:
            part = message.snapshot
            batch.snapshot.CopyFrom(
                common.KvSnapshotChunk(index=part.index, count=part.count, blocks=part.blocks)
            )
            if part.index == 0:
                batch.events.add(cleared=common.KvCacheCleared())
        for event in self._events(message.events):
            if not of_snapshot:
                self._num_events += 1
                event.event_id = self._num_events
            batch.events.append(event)
        return batch

    def _events(self, events: Iterable[scheduler_pb2.BlockEvent]) -> list[common.KvCacheEvent]:
        """One event per run of blocks that follow each other or are removed together."""
        found: list[common.KvCacheEvent] = []
        last = b""  # the name of the block that was stored last
        for event in events:
            kind = event.WhichOneof("event")
            same = bool(found) and found[-1].WhichOneof("data") == kind
            if kind == "stored":
                if not (same and event.stored.parent == last):
                    found.append(_stored(event.stored))
                found[-1].stored.blocks.append(self._block(event.stored))
                last = event.stored.name
            elif kind == "removed":
                if not same:
                    found.append(common.KvCacheEvent(removed=common.KvBlocksRemoved(tier=_DEVICE)))
                found[-1].removed.block_hashes.append(_hash(event.removed))
            else:
                found.append(common.KvCacheEvent(cleared=common.KvCacheCleared()))
        return found

    def _block(self, block: scheduler_pb2.StoredBlock) -> common.KvBlock:
        return common.KvBlock(
            block_hash=_hash(block.name),
            token_ids=np.frombuffer(block.token_ids, "<i4").tolist(),
            block_size=self._info.block_size,
            cache_level=0,
        )

    def _load(self, load: scheduler_pb2.GetLoadResponse, load_only: bool) -> common.EngineLoad:
        self._num_loads += 1
        cache = cache_use(load, self._info.block_size)
        record = common.EngineLoad(
            running_requests=load.running,
            waiting_requests=load.waiting,
            waiting_uncached_tokens=load.waiting_uncached_tokens,
            token_usage=cache.usage,
            active_token_usage=cache.usage,
            gen_throughput=load.tokens_per_s,
            max_running_requests=self._info.max_num_seqs,
            sample=self._num_loads,
            load_only=load_only,
        )
        if load_only or self._num_loads == 1:
            record.num_used_tokens = cache.used_tokens
            record.max_total_num_tokens = cache.max_tokens
            if cache.hit_rate is not None:
                record.cache_hit_rate = cache.hit_rate
        return record


def _stored(first: scheduler_pb2.StoredBlock) -> common.KvCacheEvent:
    """An event for a run of blocks that begins with `first`. The caller adds the blocks."""
    stored = common.KvBlocksStored(tier=_DEVICE, locality=common.KV_CACHE_LOCALITY_LOCAL)
    if first.parent:
        stored.parent_block_hash = _hash(first.parent)
    if first.cache_salt:
        stored.cache_salt = first.cache_salt
    return common.KvCacheEvent(stored=stored)


def _hash(name: bytes) -> int:
    """A block's name, cut to the protocol's 64 bits. Two blocks are unlikely to share them."""
    return int.from_bytes(name[:8], "little", signed=True)
