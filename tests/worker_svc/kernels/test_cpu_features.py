"""The features of the CPU, and of a CPU that a test pretends to have."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from worker_svc.kernels import cpu_features

LINUX = "fpu avx2 fma avx512f avx512_vnni avx_vnni amx_bf16 avx512_bf16".split()  # noqa: SIM905


@pytest.fixture(autouse=True)
def flags(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cpu_features, "_flags", lambda: LINUX)
    cpu_features._features.cache_clear()
    yield
    cpu_features._features.cache_clear()


@pytest.mark.parametrize(
    ("pretended", "expected"),
    [
        (None, {"avx2", "avx512f", "avx512vnni", "avxvnni", "avx512bf16", "amx-bf16"}),
        ("avx2,fma", {"avx2"}),
        ("avx2,avx512f,avx512bw", {"avx2", "avx512f"}),  # avx512bw would be more than it has
        ("", set()),
    ],
)
def test_features(
    pretended: str | None, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NANO_CPU_FEATURES", raising=False)
    if pretended is not None:
        monkeypatch.setenv("NANO_CPU_FEATURES", pretended)
    names = ("avx2", "avx512f", "avx512bw", "avx512vnni", "avxvnni", "avx512bf16", "amx-bf16")
    assert set(filter(cpu_features.has, names)) == expected
