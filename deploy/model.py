"""MODEL to a directory: hub ids are looked up here and nowhere else, services only see files."""

from __future__ import annotations

import re
from pathlib import Path

from deploy.errors import LaunchError

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# What the services read, and nothing that would have to be unpickled.
_FILES = ("*.safetensors", "*.json", "*.jinja", "merges.txt", "vocab.txt")


def resolve_model(model: str) -> Path:
    """The directory of `model`: itself, or where the files of a Hugging Face hub id are.

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
    # Imported here: it takes long, and a directory needs none of it.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(_FILES)))
    except Exception as error:  # of the hub, of its HTTP library, of the operating system
        reason = str(error).strip().partition("\n")[0]
        raise LaunchError(
            f"MODEL: {hub_id} is no directory, and cannot be had from the hub: {reason}"
        ) from error
