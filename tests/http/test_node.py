"""Others' clients for Node, which talk to a real stack."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.http.test_clients import input_of_checks
from tests.others import node_clients
from tests.stack import running_stack

CHECKS = Path(__file__).parent / "node" / "checks.mjs"
NAMES = re.findall(r"^export async function (\w+)", CHECKS.read_text(), re.M)

pytestmark = pytest.mark.skipif(not shutil.which("npm"), reason="npm is not installed")


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """How each check ended: the error, or nothing."""
    folder = tmp_path_factory.mktemp("node")
    (folder / "node_modules").symlink_to(node_clients())
    script = shutil.copy(CHECKS, folder)
    with running_stack(http_port="auto", frontends=2) as stack:
        given = json.dumps(input_of_checks(stack))
        run = subprocess.run(["node", script, given], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    found: dict[str, str] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", NAMES)
def test_others_clients(ends: dict[str, str], name: str) -> None:
    assert not ends[name], ends[name]
