"""`make check-protos` finds what breaks the public contract, and only that."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def check(checkout: Path) -> str:
    """Returns the complaints of the target's commands about a copy of the contracts, or nothing."""
    target = ["make", "--no-print-directory", "--dry-run", "check-protos"]
    recipe = subprocess.run(target, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lint, breaking = recipe.splitlines()[-2:]
    assert "lint" in lint
    script = f"set -e; {lint}; {breaking}".replace(".venv/bin", str(Path(sys.executable).parent))
    done = subprocess.run(script, shell=True, cwd=checkout, capture_output=True, text=True)
    assert bool(done.returncode) == bool(done.stdout), done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("contract", "old", "new", "found"),
    [
        ("frontend", "", "", ""),
        ("frontend", "string role = 1;", "string role = 9;", 'field "1" with name "role"'),
        ("frontend", "optional int32 top_k", "optional int64 top_k", 'changed type from "int32"'),
        ("frontend", "rpc GetModel(GetModelRequest) returns (GetModelResponse);", "", '"GetModel"'),
        ("frontend", "string cache_salt = 8;", "string CacheSalt = 8;", "lower_snake_case"),
        ("frontend", "string cache_salt = 8;", "string cache_salt = 8; string more = 99;", ""),
        ("scheduler", "Abort abort = 2;", "Abort abort = 99;", ""),
    ],
)
def test_a_planted_break_is_found(
    contract: str, old: str, new: str, found: str, tmp_path: Path
) -> None:
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    path = tmp_path / "protos" / f"{contract}.proto"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1 if old else 0))
    said = check(tmp_path)
    assert found in said
    assert bool(found) == bool(said)
