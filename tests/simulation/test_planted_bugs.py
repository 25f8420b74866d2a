"""Every bug can still be planted: its file and its text exist."""

import shutil
from pathlib import Path

import pytest

from tests.simulation.cluster.planted_bugs import CLUSTER_BUGS
from tests.simulation.mutations import ROOT, plant
from tests.simulation.planted_bugs import BUGS, Bug


@pytest.mark.parametrize("bug", [*BUGS, *CLUSTER_BUGS], ids=lambda bug: bug.name)
def test_it_can_be_planted(bug: Bug, tmp_path: Path) -> None:
    file = tmp_path / bug.package / bug.file
    file.parent.mkdir(parents=True)
    shutil.copy(ROOT / bug.package / bug.file, file)
    plant(bug, tmp_path)
    assert file.read_text() != (ROOT / bug.package / bug.file).read_text()
