"""Clients and checkers that others wrote, in an environment of their own: what they need is not the
project's.

python = others_python()  # made on first use, from requirements/test-clients.txt

`python -m tests.others` makes it, too.
"""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
_LOCKED = ROOT / "requirements" / "test-clients.txt"
_ENVIRONMENT = ROOT / ".run" / "test-clients"


@cache
def others_python() -> Path:
    """The environment's Python; only one of several processes makes it."""
    _ENVIRONMENT.parent.mkdir(exist_ok=True)
    with _ENVIRONMENT.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = _ENVIRONMENT / hashlib.sha256(_LOCKED.read_bytes()).hexdigest()[:16]
        if not made.exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", _ENVIRONMENT], check=True)
            install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            locked = ["--require-hashes", "--no-deps", "--only-binary", ":all:", "-r", _LOCKED]
            subprocess.run([_ENVIRONMENT / "bin" / "python", *install, *locked], check=True)
            made.touch()
    return _ENVIRONMENT / "bin" / "python"


if __name__ == "__main__":
    print(others_python())
