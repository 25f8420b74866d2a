"""What others wrote and only tests need. `python -m tests.others` installs it; tests do not.

python = others_python()  # has requirements/test-clients.txt: what they need is not the project's
folder = ray_packages()  # has requirements/ray.txt, for PYTHONPATH
folder = node_modules()  # has the packages of examples/typescript
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
_NODE_LOCK = ROOT / "examples" / "typescript" / "package-lock.json"
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


def node_modules() -> Path:
    """The packages of the example in TypeScript; skips the test where there are none."""
    return _installed("node") / "node_modules"


def _installed(name: str) -> Path:
    if not _stamp(name).exists():
        import pytest  # not at the top: a program installs them, too

        pytest.skip(f"{_locked(name).relative_to(ROOT)} is not installed: python -m tests.others")
    return _folder(name)


def _folder(name: str) -> Path:
    return ROOT / ".run" / f"tests-{name}"


def _locked(name: str) -> Path:
    return _NODE_LOCK if name == "node" else ROOT / "requirements" / f"{name}.txt"


def _stamp(name: str) -> Path:
    """A file in the folder, once all that is locked is installed in it."""
    return _folder(name) / hashlib.sha256(_locked(name).read_bytes()).hexdigest()[:16]


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
        if shutil.which("npm") and not (node := _stamp("node")).exists():
            node.parent.mkdir(exist_ok=True)
            for file in (_NODE_LOCK, _NODE_LOCK.with_name("package.json")):
                shutil.copy(file, node.parent)
            _run("npm", "ci", "--ignore-scripts", "--no-fund", "--prefix", node.parent)
            node.touch()


def _install(name: str, python: str | Path, *where: str | Path) -> None:
    _run(python, *_INSTALL, *where, "-r", _locked(name))
    _stamp(name).touch()


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    install()
    print(_folder("test-clients"), _folder("ray"))
