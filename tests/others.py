"""What others wrote and only tests need. `python -m tests.others` installs it; tests do not.

python = others_python()  # has requirements/test-clients.txt: what they need is not the project's
folder = ray_packages()  # has requirements/ray.txt, for PYTHONPATH
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
_INSTALL = [
    *("-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
    *("--require-hashes", "--no-deps", "--only-binary", ":all:"),
]


def others_python() -> Path:
    """The Python of an environment with others' clients; skips the test where there is none."""
    return _installed("test-clients") / "bin" / "python"


def ray_packages() -> Path:
    """A folder with Ray and what it needs, beside those that all have; skips the test where there
    is none."""
    return _installed("ray")


def _installed(name: str) -> Path:
    if not _stamp(name).exists():
        import pytest  # not at the top: a program installs them, too

        pytest.skip(f"requirements/{name}.txt is not installed: python -m tests.others")
    return _folder(name)


def _folder(name: str) -> Path:
    return ROOT / ".run" / f"tests-{name}"


def _stamp(name: str) -> Path:
    """A file in the folder, once all of requirements/NAME.txt is installed in it."""
    locked = (ROOT / "requirements" / f"{name}.txt").read_bytes()
    return _folder(name) / hashlib.sha256(locked).hexdigest()[:16]


def install() -> None:
    """Installs what is missing; of several processes, one does."""
    (ROOT / ".run").mkdir(exist_ok=True)
    with (ROOT / ".run" / "tests-others.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (clients := _stamp("test-clients")).exists():
            _run(sys.executable, "-m", "venv", "--clear", clients.parent)
            _install("test-clients", clients.parent / "bin" / "python")
        if not (ray := _stamp("ray")).exists():
            shutil.rmtree(ray.parent, ignore_errors=True)
            _install("ray", sys.executable, "--target", ray.parent)


def _install(name: str, python: str | Path, *where: str | Path) -> None:
    _run(python, *_INSTALL, *where, "-r", ROOT / "requirements" / f"{name}.txt")
    _stamp(name).touch()


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    install()
    print(_folder("test-clients"), _folder("ray"))
