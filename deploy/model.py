"""Turns MODEL into a directory: hub ids are looked up only here, services see only files."""

from __future__ import annotations

import re
from pathlib import Path

from deploy.errors import LaunchError

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# The files that the services read, none of which has to be unpickled.
_FILES = ("*.safetensors", "*.json", "*.jinja", "merges.txt", "vocab.txt")


def resolve_model(model: str) -> Path:
    """Returns `model` if it is a directory, else the directory of that Hugging Face hub id's files.

    Raises:
        LaunchError: it is neither, or cannot be downloaded.
    """
    directory = Path(model).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise LaunchError(f"MODEL: {model} holds no config.json")
        return directory
    if directory.exists() or not _HUB_ID.fullmatch(model):
        raise LaunchError(f"MODEL: {model} is no directory")
    return _download(model)


def _download(hub_id: str) -> Path:
    # Imported here: the import is slow, and a directory does not need it.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(_FILES)))
    except Exception as error:  # from the hub, its HTTP library or the operating system
        reason = str(error).strip().partition("\n")[0]
        raise LaunchError(
            f"MODEL: {hub_id} is no directory, and cannot be downloaded from the hub: {reason}"
        ) from error
