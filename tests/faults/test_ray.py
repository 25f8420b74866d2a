"""A stack on a Ray cluster: Ray starts dead actors again, on another node if theirs is lost."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.faults.network import missing
from tests.faults.ray_cluster import ray_cluster, serve
from tests.faults.streams import (
    REQUESTS,
    assert_undamaged,
    open_streams,
    undisturbed,
)
from tests.stack import DEMO_MODEL

pytestmark = pytest.mark.skipif(bool(missing()), reason=str(missing()))

_STREAMS = {name: REQUESTS[name] for name in ("greedy", "seeded", "several", "schema")}
_STEPS = 15  # so few that streams are open when processes are lost
_LIMITS = {"max_num_batched_tokens": 32, "max_num_seqs": 32}


@pytest.mark.soak
def test_a_node_with_ranks_is_lost(tmp_path: Path) -> None:
    """The addresses of all lost processes change; TLS between the services still works."""
    # An engine fits on either of one and two, but not on the head.
    with ray_cluster({"head": 1, "one": 2, "two": 2}) as cluster:
        shown = serve(cluster, tmp_path, tp=2, frontends=3, **_LIMITS)
        assert "\nOnce upon a time" in shown
        before = cluster.wait_serving()
        engine = {"worker-0", "worker-1", "scheduler-0"}
        (node,) = {before[name].node for name in engine}
        assert len({before[f"frontend-{index}"].node for index in range(3)}) == 3

        expected = undisturbed(cluster.address, _STREAMS)
        with cluster.hold.after(_STEPS), open_streams(cluster.address, _STREAMS) as streams:
            streams.wait_for_tokens(10)
            cluster.lose(cluster.name_of(node))
            cluster.hold.release()
            assert_undamaged(streams.wait_ended(), expected)

        after = cluster.wait_serving()
        assert after.keys() == before.keys()
        (elsewhere,) = {after[name].node for name in engine}
        assert elsewhere != node
        assert {after[name].address for name in engine}.isdisjoint(
            before[name].address for name in engine
        )


def test_a_killed_actor_is_started_again(tmp_path: Path) -> None:
    with ray_cluster({"head": 4}) as cluster:
        with pytest.raises(AssertionError, match="would be called in plaintext"):
            cluster.cli("up", f"--model={DEMO_MODEL}")
        shown = serve(cluster, tmp_path, **_LIMITS)
        assert "\nOnce upon a time" in shown
        expected = undisturbed(cluster.address, _STREAMS)

        lines = cluster.wait_serving()
        assert sorted(lines) == ["frontend-0", "scheduler-0", "worker-0"]
        with cluster.hold.after(_STEPS), open_streams(cluster.address, _STREAMS) as streams:
            streams.wait_for_tokens(10)
            _kill_actor_of(int(lines["worker-0"].pid))
            cluster.hold.release()
            assert_undamaged(streams.wait_ended(), expected)
        cluster.wait_serving()
        assert "already up" in cluster.cli("up")
        assert cluster.cli("down").startswith("stopped 3 processes")


def _kill_actor_of(pid: int) -> None:
    """Kills the Ray actor that runs the process, and the process with it."""
    process = psutil.Process(pid)
    while not process.name().startswith("ray::"):
        process = process.parent()
    process.kill()


@pytest.mark.soak
def test_engines_come_and_go(tmp_path: Path) -> None:
    with ray_cluster({"head": 4}) as cluster:
        serve(cluster, tmp_path, **_LIMITS)
        expected = undisturbed(cluster.address, _STREAMS)
        assert "2 engines serve" in cluster.cli("scale", "--engines=2")
        lines = cluster.wait_serving()
        assert sorted(lines) == [
            *("frontend-0", "scheduler-0", "scheduler-1", "worker-0", "worker-1"),
        ]
        with open_streams(cluster.address, _STREAMS) as streams:
            streams.wait_for_tokens(10)
            assert "1 engine serves" in cluster.cli("scale", "--engines=1")
            assert_undamaged(streams.wait_ended(), expected)
        assert sorted(cluster.ps()) == ["frontend-0", "scheduler-0", "worker-0"]
