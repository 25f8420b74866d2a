"""Packages and a model of others for tests. `python -m tests.others` installs them; tests do not.

python = others_python()  # has requirements/test-clients.txt: what they need is not the project's
folder = more_clients()  # has requirements/test-more-clients.txt but for torch, for PYTHONPATH
folder = ray_packages()  # has requirements/ray.txt, for PYTHONPATH
folder = node_modules()  # has what examples/typescript needs
folder = node_clients()  # has what tests/http/node needs
file = smollm2()  # the GGUF file of SmolLM2-135M-Instruct
file = vocabulary("llama-spm")  # a GGUF file of llama.cpp without weights; .inp and .out are beside

A test that asks for what is not installed is skipped.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from deploy.model import packaged_file, resolve_model

ROOT = Path(__file__).parents[1]
_LOCKED = {
    "test-clients": ROOT / "requirements" / "test-clients.txt",
    "test-more-clients": ROOT / "requirements" / "test-more-clients.txt",
    "ray": ROOT / "requirements" / "ray.txt",
    "node": ROOT / "examples" / "typescript" / "package-lock.json",
    "node-clients": ROOT / "tests" / "http" / "node" / "package-lock.json",
}
# llama.cpp's vocabularies and their test vectors are in the source of its package for Python.
_LLAMA_CPP = (
    "llama_cpp_python==0.3.36 "
    "--hash=sha256:832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
)
_INSTALL = [
    *("-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
    *("--require-hashes", "--no-deps", "--only-binary", ":all:"),
]


def others_python() -> Path:
    """The Python of an environment with others' clients."""
    return _installed("test-clients") / "bin" / "python"


def more_clients() -> Path:
    """A folder with clients that need other packages than `others_python` has."""
    return _installed("test-more-clients")


def ray_packages() -> Path:
    """A folder with Ray and what it needs, beside those that all have."""
    return _installed("ray")


def node_modules() -> Path:
    """The npm packages of the example in TypeScript."""
    return _installed("node") / "node_modules"


def node_clients() -> Path:
    """The npm packages of others' clients."""
    return _installed("node-clients") / "node_modules"


def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct."""
    return _packaged("smollm2")


def gemma3() -> Path:
    """The GGUF file of Gemma 3 270M."""
    return _packaged("gemma3")


def _packaged(model: str) -> Path:
    _need(packaged_file(model), f"{model} is not downloaded")
    return packaged_file(model)


def vocabulary(name: str) -> Path:
    """llama.cpp's GGUF file of a real tokenizer. The files NAME.inp and NAME.out beside it have
    texts and their token ids."""
    path = _folder("vocabularies") / f"ggml-vocab-{name}.gguf"
    _need(path, "llama.cpp's vocabularies are not downloaded")
    return path


def _installed(name: str) -> Path:
    _need(_stamp(name), f"{_LOCKED[name].relative_to(ROOT)} is not installed")
    return _folder(name)


def _need(path: Path, missing: str) -> None:
    """Skips the test if there is nothing at `path`."""
    if not path.exists():
        import pytest  # not at the top: a program installs them, too

        pytest.skip(f"{missing}: python -m tests.others")


def _folder(name: str) -> Path:
    return ROOT / ".run" / f"tests-{name}"


def _stamp(name: str) -> Path:
    """A file in the folder, once all that is locked is installed in it."""
    return _folder(name) / hashlib.sha256(_LOCKED[name].read_bytes()).hexdigest()[:16]


def install() -> None:
    """Installs what is missing; of several processes, one does."""
    for model in ("smollm2", "gemma3"):
        resolve_model(model)
    (ROOT / ".run").mkdir(exist_ok=True)
    with (ROOT / ".run" / "tests-others.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _folder("vocabularies").exists():
            _download_vocabularies()
        for name, locked in _LOCKED.items():
            is_npm = locked.suffix == ".json"
            if _stamp(name).exists() or (is_npm and not shutil.which("npm")):
                continue
            folder = _folder(name)
            shutil.rmtree(folder, ignore_errors=True)
            if name == "test-clients":
                _run(sys.executable, "-m", "venv", folder)
                _run(folder / "bin" / "python", *_INSTALL, "-r", locked)
            elif not is_npm:
                _run(sys.executable, *_INSTALL, "--target", folder, "-r", locked)
            else:
                folder.mkdir()
                for file in (locked, locked.with_name("package.json")):
                    shutil.copy(file, folder)
                _run("npm", "ci", "--ignore-scripts", "--no-fund", "--prefix", folder)
            _stamp(name).touch()


def _download_vocabularies() -> None:
    with tempfile.TemporaryDirectory(dir=ROOT / ".run") as temporary:
        locked = Path(temporary, "requirements.txt")
        locked.write_text(_LLAMA_CPP)
        options = ["--quiet", "--no-deps", "--no-binary", ":all:", "--require-hashes"]
        _run(sys.executable, "-m", "pip", "download", *options, "--dest", temporary, "-r", locked)
        (archive,) = Path(temporary).glob("*.tar.gz")
        made = Path(temporary, "vocabularies")
        made.mkdir()
        with tarfile.open(archive) as source:
            for member in source:
                if "/models/ggml-vocab-" in member.name:
                    member.name = Path(member.name).name
                    source.extract(member, made, filter="data")
        made.rename(_folder("vocabularies"))


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    install()
