"""What others wrote and only tests need, each made on first use.

python = others_python()  # has requirements/test-clients.txt: what they need is not the project's
folder = ray_packages()  # has requirements/ray.txt, for PYTHONPATH
folder = node_modules()  # has what examples/typescript needs; only if it was made before

`python -m tests.others` makes all, the last one if there is npm.
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
_NODE_LOCK = ROOT / "examples" / "typescript" / "package-lock.json"
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


def node_modules() -> Path | None:
    """The packages of the example in TypeScript; None if `python -m tests.others` has not installed
    those that it has now."""
    folder = _folder("node")
    return folder / "node_modules" if _mark(folder, _NODE_LOCK).exists() else None


def _install_node_modules() -> None:
    def make(folder: Path, locked: Path) -> None:
        folder.mkdir(exist_ok=True)
        for file in (locked, locked.with_name("package.json")):
            shutil.copy(file, folder)
        subprocess.run(["npm", "ci", "--ignore-scripts", "--no-fund"], cwd=folder, check=True)

    _made("node", make, _NODE_LOCK)


def _folder(name: str) -> Path:
    return ROOT / ".run" / f"tests-{name}"


def _mark(folder: Path, locked: Path) -> Path:
    """The file that says that the folder was made from these packages."""
    return folder / hashlib.sha256(locked.read_bytes()).hexdigest()[:16]


def _made(name: str, make: Callable[[Path, Path], None], locked: Path | None = None) -> Path:
    """The folder that is made from `locked`, by default requirements/NAME.txt, by only one of
    several processes."""
    folder, locked = _folder(name), locked or ROOT / "requirements" / f"{name}.txt"
    folder.parent.mkdir(exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = _mark(folder, locked)
        if not made.exists():
            make(folder, locked)
            made.touch()
    return folder


if __name__ == "__main__":
    print(others_python(), ray_packages())
    if shutil.which("npm"):
        _install_node_modules()
