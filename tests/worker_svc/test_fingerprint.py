from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.damage import damages
from tests.worker_svc.harness import save_model, worker_settings
from tests.worker_svc.untrusted import untrusted
from worker_svc.errors import ModelError
from worker_svc.model_runner import ModelRunner
from worker_svc.weights import fingerprint
from worker_svc.weights.fingerprint import ModelFiles


@pytest.fixture
def model(tmp_path: Path, cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Whose digests are kept though it is new."""
    monkeypatch.setattr(fingerprint, "_SETTLED_NS", -(10**18))
    save_model(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def digests(cache_home: Path) -> Path:
    """The folder that keeps them."""
    return cache_home / "nano-vllm-grpc" / "digests"


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that have been hashed."""
    real, names = fingerprint._hash, []

    def noting(file: Any) -> str:
        names.append(Path(file.name).name)
        return real(file)

    monkeypatch.setattr(fingerprint, "_hash", noting)
    return names


def weights(model: Path) -> Path:
    return model / "model.safetensors"


def change_a_byte(path: Path) -> None:
    """In the middle, at a later tick of the file system's clock."""
    before = path.stat()
    while path.stat().st_ctime_ns == before.st_ctime_ns:
        with path.open("r+b") as file:
            file.seek(before.st_size // 2)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
    with path.open("r+b") as file:
        file.seek(before.st_size // 2)
        file.write(bytes([byte ^ 2]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def test_the_configuration_counts(model: Path) -> None:
    first = ModelFiles(model).fingerprint
    config = model / "config.json"
    config.write_text(config.read_text() + " ")
    assert ModelFiles(model).fingerprint != first


def test_only_a_shard_that_changed_is_hashed_again(model: Path, hashed: list[str]) -> None:
    save_model(model, max_shard_size="50KB")
    weights(model).unlink()
    first = ModelFiles(model).fingerprint
    shards = [path.name for path in sorted(model.glob("*.safetensors"))]
    assert hashed == shards
    change_a_byte(model / shards[1])
    assert ModelFiles(model).fingerprint != first
    assert hashed == [*shards, shards[1]]


def test_ranks_agree(model: Path) -> None:
    ranks = [ModelRunner(worker_settings(model, rank=rank, tp=2)) for rank in range(2)]
    alone = ModelRunner(worker_settings(model))
    assert {each.info.fingerprint for each in [alone, *ranks]} == {alone.info.fingerprint}


def test_other_ranks_wait_for_the_first(
    model: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hashing, waiting = threading.Event(), threading.Event()
    hash_file, flock = fingerprint._hash, fingerprint.fcntl.flock

    def hash_once_another_waits(file: Any) -> str:
        hashing.set()
        assert waiting.wait(60)
        return hash_file(file)

    def note_second(file: int, operation: int) -> None:
        if hashing.is_set():
            waiting.set()
        flock(file, operation)

    monkeypatch.setattr(fingerprint, "_hash", hash_once_another_waits)
    monkeypatch.setattr(fingerprint.fcntl, "flock", note_second)
    found: list[str] = []
    first = threading.Thread(target=lambda: found.append(ModelFiles(model).fingerprint))
    first.start()
    assert hashing.wait(60)
    found.append(ModelFiles(model).fingerprint)
    first.join()
    assert found[0] == found[1]
    assert len(hashed) == 1


def test_a_link_to_another_blob(model: Path) -> None:
    """As an update in the cache of Hugging Face's hub."""
    first = ModelFiles(model).fingerprint
    blob, other = weights(model).rename(model / "0123"), model / "4567"
    weights(model).symlink_to(blob)
    assert ModelFiles(model).fingerprint == first
    other.write_bytes(blob.read_bytes())
    change_a_byte(other)
    weights(model).unlink()
    weights(model).symlink_to(other)
    assert ModelFiles(model).fingerprint != first


def test_a_file_that_has_just_changed_or_changes_meanwhile_is_not_remembered(
    model: Path, digests: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of its file system may not have ticked when it changes again."""
    real = fingerprint._hash

    def hash_and_change(file: Any) -> str:
        digest = real(file)
        change_a_byte(weights(model))
        return digest

    with monkeypatch.context() as patched:
        patched.setattr(fingerprint, "_hash", hash_and_change)
        ModelFiles(model)
    assert list(digests.iterdir()) == []
    monkeypatch.setattr(fingerprint, "_SETTLED_NS", 10**18)
    os.utime(weights(model), (1, 1))
    ModelFiles(model)
    assert list(digests.iterdir()) == []


def test_weights_that_change_while_they_are_loaded(model: Path) -> None:
    files = ModelFiles(model)
    weights(model).touch()
    files.check_unchanged()
    change_a_byte(weights(model))
    with pytest.raises(ModelError, match="changed while it was loaded"):
        files.check_unchanged()


def test_weights_that_cannot_be_read(
    model: Path, digests: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: Any) -> str:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(fingerprint, "_hash", fail)
    with pytest.raises(ModelError, match=r"model\.safetensors: cannot be read: .*Input/output"):
        ModelFiles(model)
    assert list(digests.iterdir()) == []


@damages
def test_a_damaged_digest_is_replaced(
    model: Path, digests: Path, hashed: list[str], damage: Callable[[Path], None]
) -> None:
    first = ModelFiles(model).fingerprint
    (kept,) = digests.iterdir()
    whole = kept.read_bytes()
    damage(kept)
    assert ModelFiles(model).fingerprint == first
    assert len(hashed) == 2
    assert kept.read_bytes() == whole


@pytest.mark.parametrize("of_folder", [True, False])
@untrusted
def test_a_cache_that_cannot_be_used_costs_the_hashing(
    model: Path,
    digests: Path,
    hashed: list[str],
    change: Callable[[Path], None],
    of_folder: bool,
) -> None:
    first = ModelFiles(model).fingerprint
    (kept,) = digests.iterdir()
    change(kept.parent if of_folder else kept)
    with capture_logs() as logs:
        assert ModelFiles(model).fingerprint == first
    assert len(hashed) == 2
    assert [each["log_level"] for each in logs if "not kept" in each["event"]] == ["warning"]


def test_without_a_home_they_are_hashed_each_time(
    model: Path, hashed: list[str], request: pytest.FixtureRequest
) -> None:
    first = ModelFiles(model).fingerprint
    request.getfixturevalue("no_home")
    assert ModelFiles(model).fingerprint == first
    assert len(hashed) == 2


def test_digests_used_last_are_kept(
    model: Path, digests: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "_KEPT", 2)
    others = [model.parent / name for name in ("b", "c")]
    for other in others:
        save_model(other)
    for number, each in enumerate([model, others[0], model, others[1]]):
        ModelFiles(each)
        for path in digests.iterdir():  # what was just touched is the newest
            if path.stat().st_mtime > 1000:
                os.utime(path, (number, number))
    assert len(hashed) == 3
    assert len(list(digests.iterdir())) == 2
    ModelFiles(model)
    assert len(hashed) == 3
