"""Finds the directory of MODEL. Only this module reads from the hub; services read files."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from deploy.errors import LaunchError

HUB = "hub:"
GGUF = ".gguf"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_REVISION = re.compile(r"(?!.*\.\.)[\w./-]+")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# The files that the services read; none of them is ever unpickled.
_FILES = ("*.safetensors", "*.json", "*.jinja", "merges.txt", "vocab.txt")


def resolve_model(model: str) -> Path:
    """Returns the directory of `model`.

    Args:
        model: a directory, a GGUF file, which is unpacked, or `hub:OWNER/NAME@REVISION`: a Hugging
            Face repository at a commit, branch or tag, which is downloaded. For a branch or tag,
            whose files may change, its present commit is printed on stderr.

    Raises:
        LaunchError: `model` is none of these, or cannot be unpacked or downloaded.
    """
    if model.startswith(HUB):
        return _from_hub(model)
    directory = Path(model).expanduser()
    if directory.suffix == GGUF and directory.is_file():
        # Imported here: the import is slow, and a directory does not need it.
        from deploy.gguf.unpack import unpack

        return unpack(directory)
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise LaunchError(f"MODEL: {model} has no config.json")
        return directory
    hint = ""
    if _HUB_ID.fullmatch(model) and not directory.exists():
        hint = f"; for the hub, use {HUB}{model}@REVISION"
    raise LaunchError(f"MODEL: {model} is not a directory{hint}")


def model_name(model: str, directory: Path) -> str:
    """Returns the default name of `model` for clients: OWNER/NAME of the hub, or the name of the
    GGUF file or `directory`."""
    if model.startswith(HUB):
        return model.removeprefix(HUB).partition("@")[0]
    return Path(model).stem if model.endswith(GGUF) else directory.resolve().name


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
    # Imported here: the import is slow, and a local directory does not need it.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=list(_FILES)))
    except Exception as error:  # from the hub, its HTTP library or the operating system
        reason = str(error).strip().partition("\n")[0]
        raise LaunchError(f"MODEL: {model} cannot be downloaded: {reason}") from error
