from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.worker_svc.harness import save_model, worker_settings
from tests.worker_svc.unprivileged import run_read_only
from worker_svc.errors import ModelError
from worker_svc.model_runner import ModelRunner
from worker_svc.weights import fingerprint
from worker_svc.weights.fingerprint import ModelFiles


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Whose digests are kept though it is new."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(fingerprint, "_SETTLED_NS", -(10**18))
    save_model(tmp_path / "model")
    return tmp_path / "model"


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


def digests(model: Path) -> Path:
    return model.parent / "cache" / "nano-vllm-grpc" / "digests"


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


def test_one_byte_makes_another_model(model: Path) -> None:
    first = ModelFiles(model).fingerprint
    change_a_byte(weights(model))
    assert ModelFiles(model).fingerprint != first


def test_the_configuration_counts(model: Path) -> None:
    first = ModelFiles(model).fingerprint
    config = model / "config.json"
    config.write_text(config.read_text() + " ")
    assert ModelFiles(model).fingerprint != first


def test_a_second_start_hashes_nothing(model: Path, hashed: list[str]) -> None:
    first = ModelFiles(model).fingerprint
    assert ModelFiles(model).fingerprint == first
    assert hashed == ["model.safetensors"]


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
    addresses = "127.0.0.1:1", "127.0.0.1:2"
    ranks = [
        ModelRunner(worker_settings(model, rank=rank, tp=2, worker_addresses=addresses))
        for rank in range(2)
    ]
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
    blob = weights(model).rename(model / "0123")
    weights(model).symlink_to(blob)
    first = ModelFiles(model).fingerprint
    other = model / "4567"
    other.write_bytes(blob.read_bytes())
    change_a_byte(other)
    weights(model).unlink()
    weights(model).symlink_to(other)
    assert ModelFiles(model).fingerprint != first


def test_a_file_that_has_just_changed_is_not_remembered(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of its file system may not have ticked when it changes again."""
    monkeypatch.setattr(fingerprint, "_SETTLED_NS", 10**18)
    os.utime(weights(model), (1, 1))
    ModelFiles(model)
    assert list(digests(model).iterdir()) == []


def test_a_file_that_changes_meanwhile_is_not_remembered(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fingerprint._hash

    def hash_and_change(file: Any) -> str:
        digest = real(file)
        change_a_byte(weights(model))
        return digest

    monkeypatch.setattr(fingerprint, "_hash", hash_and_change)
    ModelFiles(model)
    assert list(digests(model).iterdir()) == []


def test_weights_that_change_while_they_are_loaded(model: Path) -> None:
    files = ModelFiles(model)
    weights(model).touch()
    files.check_unchanged()
    change_a_byte(weights(model))
    with pytest.raises(ModelError, match="changed while it was loaded"):
        files.check_unchanged()


def test_weights_that_cannot_be_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: Any) -> str:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(fingerprint, "_hash", fail)
    with pytest.raises(ModelError, match=r"model\.safetensors: cannot be read: .*Input/output"):
        ModelFiles(model)
    assert list(digests(model).iterdir()) == []


@pytest.mark.parametrize("size", [0, 20, 40, -1])
def test_a_broken_digest_is_replaced(model: Path, hashed: list[str], size: int) -> None:
    first = ModelFiles(model).fingerprint
    (kept,) = digests(model).iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(whole[:size])
    assert ModelFiles(model).fingerprint == first
    assert len(hashed) == 2
    assert kept.read_bytes() == whole


def is_foreign(path: Path) -> None:
    os.chown(path, 12345, -1)


def is_writable(path: Path) -> None:
    path.chmod(path.stat().st_mode | stat.S_IWOTH)


def is_a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def is_of_another_kind(path: Path) -> None:
    folder = path.is_dir()
    path.rename(path.with_name("elsewhere"))
    if folder:
        path.touch()
    else:
        os.mkfifo(path)


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


@pytest.mark.parametrize("of_folder", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(is_foreign, marks=as_root),
        is_writable,
        is_a_link,
        is_of_another_kind,
    ],
)
def test_a_cache_that_cannot_be_used_costs_the_hashing(
    model: Path, hashed: list[str], change: Callable[[Path], None], of_folder: bool
) -> None:
    first = ModelFiles(model).fingerprint
    (kept,) = digests(model).iterdir()
    change(kept.parent if of_folder else kept)
    with capture_logs() as logs:
        assert ModelFiles(model).fingerprint == first
    assert len(hashed) == 2
    assert [each["log_level"] for each in logs if "not kept" in each["event"]] == ["warning"]


READ_ONLY = """
from pathlib import Path
from structlog.testing import capture_logs
from tests.worker_svc.unprivileged import give_up_root
from worker_svc.weights.fingerprint import ModelFiles

give_up_root()
with capture_logs() as logs:
    print(ModelFiles(Path("model")).fingerprint)
print(*(each["event"] for each in logs if each["log_level"] == "warning"), sep="\\n")
"""


def test_read_only_directory() -> None:
    with TemporaryDirectory() as directory:  # pytest's are closed to other users
        model = Path(directory, "model")
        save_model(model)
        weights(model).chmod(0o644)
        found = run_read_only(Path(directory), READ_ONLY)
        assert found == [ModelFiles(model).fingerprint, "digests of weights are not kept"]


def test_no_home(model: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("could not determine home directory")

    first = ModelFiles(model).fingerprint
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert ModelFiles(model).fingerprint == first
    assert len(hashed) == 2


def test_digests_used_last_are_kept(
    model: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "_KEPT", 2)
    others = [model.parent / name for name in ("b", "c")]
    for other in others:
        save_model(other)
    for number, each in enumerate([model, others[0], model, others[1]]):
        ModelFiles(each)
        for path in digests(model).iterdir():  # what was just touched is the newest
            if path.stat().st_mtime > 1000:
                os.utime(path, (number, number))
    assert len(hashed) == 3
    assert len(list(digests(model).iterdir())) == 2
    ModelFiles(model)
    assert len(hashed) == 3
