"""The other servers and the models in their formats, as docs/results/peers.md installs them."""

from __future__ import annotations

import sys
from pathlib import Path

from bench.peers.driver import FILE, Entry
from bench.workload import BenchError
from shared.model_directory import GGUF_INDEX, GGUF_WEIGHTS

ROOT = Path(__file__).parents[2]
HOME = ROOT / ".peers"


def environment(peer: str) -> Path:
    return HOME / peer


def python(peer: str) -> Path:
    """The interpreter for a server's driver.

    Raises:
        BenchError: the server is not installed.
    """
    if peer == "nano":
        return Path(sys.executable)  # this project
    return _existing(environment(peer) / "bin" / "python")


def converted(entry: Entry, model: Path) -> Path:
    """The model in the entry's format.

    Raises:
        BenchError: the model was not converted.
    """
    if entry.peer in ("nano", "vllm"):
        return model
    if entry.weights == FILE:
        return (model / GGUF_WEIGHTS).resolve()
    return _existing(HOME / "models" / f"{model.name}-{entry.name}")


def is_gguf(model: Path) -> bool:
    """Whether a model directory was made of a GGUF file, which only some servers read."""
    return (model / GGUF_INDEX).exists()


def _existing(path: Path) -> Path:
    if not path.exists():
        raise BenchError(f"{path.relative_to(HOME.parent)} is missing; see docs/results/peers.md")
    return path
