from __future__ import annotations

from pathlib import Path

import pytest

from tests.worker_svc.quantization.exact import use_exact_weights


@pytest.fixture(autouse=True)
def exact_weights(cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also begins with an empty cache of packed weights."""
    use_exact_weights(monkeypatch)
