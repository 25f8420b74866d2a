"""Each overlay, with components as documented: its manifests, and the processes they start."""

from __future__ import annotations

import pytest

from tests.deploy.kubernetes.pods import Process, processes
from tests.deploy.kubernetes.rendering import COMBINATIONS, Manifest, render_combination

Combination = tuple[str, tuple[str, ...]]


@pytest.fixture(scope="module", params=COMBINATIONS, ids=lambda each: "+".join((each[0], *each[1])))
def combination(request: pytest.FixtureRequest) -> Combination:
    found: Combination = request.param
    return found


@pytest.fixture(scope="module")
def manifests(combination: Combination) -> list[Manifest]:
    return render_combination(*combination)


@pytest.fixture(scope="module")
def started(manifests: list[Manifest]) -> list[Process]:
    return processes(manifests)
