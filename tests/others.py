"""What others wrote and only tests need, each made on first use.

python = others_python()  # has requirements/test-clients.txt: what they need is not the project's
folder = ray_packages()  # has requirements/ray.txt, for PYTHONPATH

`python -m tests.others` makes both, too.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
_INSTALL = [
    *("-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
    *("--require-hashes", "--no-deps", "--only-binary", ":all:"),
]


@cache
def others_python() -> Path:
    """The Python of an environment with others' clients."""

    def make(environment: Path, locked: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--clear", environment], check=True)
        python = environment / "bin" / "python"
        subprocess.run([python, *_INSTALL, "-r", locked], check=True)

    return _made("test-clients", make) / "bin" / "python"


@cache
def ray_packages() -> Path:
    """A folder with Ray and what it needs, beside those that all have."""

    def make(folder: Path, locked: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        target = ("--target", folder)
        subprocess.run([sys.executable, *_INSTALL, *target, "-r", locked], check=True)

    return _made("ray", make)


def _made(name: str, make: Callable[[Path, Path], None]) -> Path:
    """The folder that is made from requirements/NAME.txt by only one of several processes."""
    locked, folder = ROOT / "requirements" / f"{name}.txt", ROOT / ".run" / f"tests-{name}"
    folder.parent.mkdir(exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = folder / hashlib.sha256(locked.read_bytes()).hexdigest()[:16]
        if not made.exists():
            make(folder, locked)
            made.touch()
    return folder


if __name__ == "__main__":
    print(others_python(), ray_packages())
