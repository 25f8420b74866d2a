from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from transformers import Qwen3ForCausalLM

from tests.worker_svc.harness import save_model
from worker_svc.devices.choice import choose_vector_math
from worker_svc.kernels.cpu.library import set_threads
from worker_svc.kernels.cpu_features import num_cores

if TYPE_CHECKING:
    from tests.worker_svc.serving import Worker

choose_vector_math()  # for transformers too


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a small float32 model."""
    path = tmp_path_factory.mktemp("tiny")
    save_model(path)
    return path


@pytest.fixture(scope="session")
def tiny_oracle(tiny_dir: Path) -> Qwen3ForCausalLM:
    """The same model in transformers."""
    return Qwen3ForCausalLM.from_pretrained(tiny_dir).eval()


@pytest.fixture
async def worker(tiny_dir: Path, tmp_path: Path) -> AsyncIterator[Worker]:
    from tests.worker_svc.serving import running  # a GPU's machine may have no gRPC

    async with running(tiny_dir, tmp_path) as started:
        await started.service.execution.load()
        await started.server.set_serving(True)
        yield started


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets how many threads run the kernels that the test calls."""
    yield set_threads
    set_threads(num_cores())


@pytest.fixture(autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache directory, empty."""
    path = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    return path


@pytest.fixture
def no_home(cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the user's cache directory away again."""

    def fail() -> Path:
        raise RuntimeError("could not determine home directory")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", fail)
