"""A process that may not write to its directory, whoever runs the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
_NOBODY = 65534


def give_up_root() -> None:
    """Root may write anywhere; imports come before, since the checkout may be closed to others."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(_NOBODY)
        os.setuid(_NOBODY)


def run_read_only(directory: Path, code: str) -> list[str]:
    """Runs Python code, which calls `give_up_root`, in `directory` -> the lines that it prints."""
    directory.chmod(0o555)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=directory,
            env=os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(directory)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    finally:
        directory.chmod(0o755)
    return done.stdout.splitlines()
