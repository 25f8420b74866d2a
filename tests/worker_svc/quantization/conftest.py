from __future__ import annotations

from pathlib import Path

import pytest

from tests.worker_svc.quantization.exact import use_exact_weights


@pytest.fixture(autouse=True)
def exact_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    use_exact_weights(monkeypatch)


@pytest.fixture(autouse=True)
def cache_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache directory, empty."""
    path = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    return path
