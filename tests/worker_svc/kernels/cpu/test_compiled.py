"""Compiled kernels that another process, or another checkout, has kept."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.worker_svc.untrusted import untrusted
from worker_svc.kernels.cpu import compiled


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "numba" / ("f" * 32)
    monkeypatch.setattr(compiled, "_FOLDER", path)
    compiled._folder.cache_clear()
    yield path
    compiled._folder.cache_clear()


def start(checkout: str = "/checkout") -> tuple[bool, list[str]]:
    """Calls a kernel as a new process would -> whether it was loaded, and what was said."""
    names: dict[str, Any] = {"__name__": "worker_svc.kernels.cpu.module"}
    exec(compile("def add(a, b): return a + b", f"{checkout}/module.py", "exec"), names)
    compiled._folder.cache_clear()
    with capture_logs() as logs:
        add = compiled.kernel(nogil=True)(names["add"])
        assert add(2, 3) == 5
    stats = add.stats
    assert sum(stats.cache_hits.values()) + sum(stats.cache_misses.values()) == 1
    return bool(stats.cache_hits), [each["event"] for each in logs]


def test_another_checkout_loads_them(folder: Path) -> None:
    assert start("/checkout") == (False, [])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert start("/another") == (True, [])


@pytest.fixture
def compiling(folder: Path) -> Iterator[Callable[[], None]]:
    """Another process compiles the kernel, until the function that this is has been called."""
    start()
    files = {path: path.read_bytes() for path in folder.glob("*.nb?")}
    for path in files:
        path.unlink()
    (path,) = folder.glob("*.lock")
    with path.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def finish() -> None:
            for path, content in files.items():
                path.write_bytes(content)
            lock.close()

        yield finish


def test_a_process_that_compiles_is_waited_for(
    compiling: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "time", SimpleNamespace(sleep=lambda _: compiling()))
    assert start() == (True, [])


def test_a_stopped_process_is_not_waited_for(
    compiling: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "time", SimpleNamespace(sleep=lambda _: None))
    assert start() == (False, [])


def test_the_folder_depends_on_the_sources_alone(tmp_path: Path) -> None:
    here = Path(compiled.__file__).parent
    copy = tmp_path / "kernels" / "cpu"
    shutil.copytree(here.parent, copy.parent)  # with the times of now, as git makes it
    assert compiled._digest(copy) == compiled._digest(here)
    for path in (copy / "simd.py", copy.parent / "logits.py"):
        before = compiled._digest(copy)
        path.write_text(path.read_text() + "\n")
        assert compiled._digest(copy) != before


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
@pytest.mark.parametrize("content", [b"", b"what a full disk left"])
def test_a_broken_file_is_replaced(folder: Path, suffix: str, content: bytes) -> None:
    start()
    (path,) = folder.glob(f"*.{suffix}")
    path.write_bytes(content)
    assert start() == (False, ["kept kernel is broken; compiling again"])
    assert start() == (True, [])


@untrusted
def test_a_folder_that_others_may_have_written_is_not_used(folder: Path, change: Any) -> None:
    start()
    change(folder)
    assert start() == (False, ["compiled kernels are not kept; each start compiles again"])


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_FOLDER", None)
    assert start() == (False, ["compiled kernels are not kept; each start compiles again"])


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", no_space)
    assert start() == (False, ["compiled kernel is not kept; the next start compiles again"])


def test_the_oldest_folders_are_removed(folder: Path) -> None:
    """But nothing else that lies beside them."""
    others = [folder.with_name(f"{age:032x}") for age in range(compiled._KEPT + 2)]
    for age, other in enumerate([*others, folder.with_name("other")]):
        other.mkdir(parents=True)
        (other / "kernel.nbi").touch()
        os.utime(other, (10**9 - age, 10**9 - age))
    start()
    left = {path.name for path in folder.parent.iterdir()}
    assert left == {folder.name, "other", *(each.name for each in others[: compiled._KEPT - 1])}
