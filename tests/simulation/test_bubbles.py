"""How long pipeline stages wait: what docs/concepts/scheduling.md says of it."""

from __future__ import annotations

import pytest

from tests.simulation.bubbles import idle_share


@pytest.mark.parametrize(
    ("stages", "streams", "scale", "share"),
    [(1, 32, 1, 0.0), (2, 1, 1, 0.6), (4, 32, 1, 0.19), (8, 256, 1, 0.18), (8, 32, 8, 0.04)],
)
def test_the_share_of_time_in_which_stages_wait(
    stages: int, streams: int, scale: int, share: float
) -> None:
    assert idle_share(stages, streams, scale) == pytest.approx(share, abs=0.03)
