"""Compares a frontend's knowledge of a cache with the block manager, whatever happens there."""

from __future__ import annotations

from collections import Counter
from random import Random

from frontend.engines.prefix_index import PrefixIndex
from scheduler_svc.block_watch import watched
from scheduler_svc.core.blocks.block_manager import BlockManager
from scheduler_svc.core.sampling import SamplingParams
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.rpc.block_events import event_messages, snapshot_parts
from shared.paging import Paging
from tests.simulation import virtual_time
from tests.simulation.cluster.checks import check_index

_STEPS = 200
_BLOCKS, _SIZE = 12, 2


def _compute(blocks: BlockManager, seq: Sequence, tokens: list[int]) -> None:
    """Computes all that a sequence has, then as many of `tokens` as there is room for."""
    seq.num_computed_tokens = seq.num_scheduled_tokens = seq.num_tokens
    for token in tokens:
        if not blocks.reserve(seq, 1):
            break
        seq.tokens.append(token)
        seq.num_computed_tokens = seq.num_scheduled_tokens = seq.num_tokens
    blocks.advance(seq)


def simulate(seed: int) -> Counter[str]:
    """An index has exactly what an engine holds. A block may outlive the one before it, which
    another sequence computed as well."""
    return virtual_time.run(_simulate(Random(seed)))


async def _simulate(rng: Random) -> Counter[str]:
    blocks, index, running = (
        BlockManager(_BLOCKS, Paging(_SIZE)),
        PrefixIndex(_SIZE),
        list[Sequence](),
    )
    counts: Counter[str] = Counter()
    with watched(blocks) as watch:
        for number in range(_STEPS):
            what = rng.random()
            if what < 0.4:
                prompt = [1, 2, 3, 4, 5, 6][: rng.randint(1, 6)]
                seq = Sequence((0, number), prompt, SamplingParams(max_tokens=9))
                if blocks.allocate_prompt(seq):
                    running.append(seq)
            elif what < 0.7 and running:
                _compute(blocks, rng.choice(running), [rng.choice([7, 8])])
            elif what < 0.98 and running:
                blocks.free(running.pop(rng.randrange(len(running))))
            elif what > 0.995:
                blocks.reset()
                running.clear()
            for message in event_messages(watch.take()):
                counts["messages"] += 1
                await index.apply(0, message)
            check_index(index, 0, blocks)
    for part in snapshot_parts(blocks.stored_blocks()):
        counts["parts of snapshots"] += 1
        await index.apply(0, part)
    check_index(index, 0, blocks)
    return counts
