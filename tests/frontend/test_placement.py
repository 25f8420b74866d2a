"""Several engines behind one frontend: where requests go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from frontend.engines.prefix_index import PrefixIndex
from shared.pb import scheduler_pb2 as pb
from tests.frontend.cluster import Cluster, Two, submitted
from tests.frontend.fake_scheduler import INFO, FakeScheduler
from tests.waiting import until

BLOCK = INFO.block_size
LONG_PROMPT = list(range(100, 100 + 4 * BLOCK + 1))


def stored(prompt: Sequence[int], salt: str = "", name: bytes = b"") -> pb.BlockEvents:
    """The events of a prompt's full blocks, which the engine calls `name` and a number."""
    events, parent = [], b""
    for i in range(len(prompt) // BLOCK):
        block = pb.StoredBlock(
            name=name + bytes([i]),
            parent=parent,
            token_ids=np.array(prompt[i * BLOCK : (i + 1) * BLOCK], "<i4").tobytes(),
            cache_salt=salt,
        )
        events.append(pb.BlockEvent(stored=block))
        parent = block.name
    return pb.BlockEvents(events=events, load=pb.GetLoadResponse(blocks_free=1))


async def send(cluster: Cluster, scheduler: FakeScheduler, *messages: pb.BlockEvents) -> None:
    """Sends messages of a cache, and waits until the frontend has read one more, without news."""
    last = pb.BlockEvents(load=messages[-1].load)
    last.load.steps = next(cluster.numbers)
    for message in (*messages, last):
        scheduler.block_events.put_nowait(message)
    await until(lambda: last in cluster.taken, "the frontend to know")


async def taker(cluster: Cluster, *args: Any, **kwargs: Any) -> str:
    """The name of the engine that gets a request."""
    stream = cluster.submit(*args, **kwargs)
    name = cluster.engine_of(stream)
    await submitted(cluster.schedulers[name])
    stream.close()
    return name


@pytest.mark.parametrize("holder", ["a", "b"])
async def test_a_request_goes_to_the_engine_that_has_its_prefix(
    cluster: Cluster, two: Two, holder: str
) -> None:
    scheduler = cluster.schedulers[holder]
    await send(cluster, scheduler, stored(LONG_PROMPT, name=b"x"))
    assert await taker(cluster, LONG_PROMPT) == holder
    stream = cluster.submit(LONG_PROMPT)
    assert (await submitted(scheduler)).expected_cached_tokens == 4 * BLOCK
    stream.close()
    # Each salt has its own prefixes, and evicted blocks do not count.
    other = "b" if holder == "a" else "a"
    await send(cluster, cluster.schedulers[other], stored(LONG_PROMPT, "salt", b"y"))
    assert await taker(cluster, LONG_PROMPT, cache_salt="salt") == other
    assert await taker(cluster, LONG_PROMPT) == holder
    removed = [pb.BlockEvent(removed=b"x" + bytes([i])) for i in range(3, 0, -1)]
    await send(cluster, scheduler, pb.BlockEvents(events=removed))
    await send(cluster, cluster.schedulers[other], stored(LONG_PROMPT, name=b"z"))
    assert await taker(cluster, LONG_PROMPT) == other


async def test_a_watch_that_fails_is_restarted(
    cluster: Cluster, two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _ = two
    await send(cluster, a, stored(LONG_PROMPT, name=b"x"))
    engine = cluster.engine("a")
    with monkeypatch.context() as patch:
        patch.setattr(PrefixIndex, "apply", lambda *_: 1 / 0)
        a.block_events.put_nowait(stored(LONG_PROMPT, name=b"y"))
        await until(lambda: engine.index is None, "the frontend to know")
    await until(lambda: engine.index is not None, "the frontend to know")
    assert not engine.index._names.get(engine.number)  # type: ignore[union-attr]
    await send(cluster, a, stored(LONG_PROMPT, name=b"z"))
    assert await taker(cluster, LONG_PROMPT) == "a"


async def test_requests_that_arrive_together_go_to_the_engine_that_computes_their_prefix(
    cluster: Cluster, two: Two
) -> None:
    slow = pb.GetLoadResponse(prompt_token_s=0.01)
    for scheduler in two:
        await send(cluster, scheduler, pb.BlockEvents(load=slow))
    first = await taker(cluster, LONG_PROMPT)
    streams = [cluster.submit(LONG_PROMPT) for _ in range(3)]
    assert {cluster.engine_of(stream) for stream in streams} == {first}


async def test_a_prefix_does_not_outweigh_a_long_wait(cluster: Cluster, two: Two) -> None:
    a, b = two
    busy = stored(LONG_PROMPT)
    busy.load.CopyFrom(pb.GetLoadResponse(waiting_uncached_tokens=10_000, prompt_token_s=0.001))
    await send(cluster, a, busy)
    await send(cluster, b, pb.BlockEvents(load=pb.GetLoadResponse(prompt_token_s=0.001)))
    assert await taker(cluster, LONG_PROMPT) == "b"


async def test_a_cache_is_watched_again_after_a_connection_ends(cluster: Cluster, two: Two) -> None:
    """The stream of requests ends first; its channel is closed with the other calls on it."""
    a, _ = two
    await send(cluster, a, stored(LONG_PROMPT))
    a.drop_connection()
    await cluster.until_connected("b")
    await cluster.until_connected("a", "b")
    await send(cluster, a, stored(LONG_PROMPT))
    assert await taker(cluster, LONG_PROMPT) == "a"
