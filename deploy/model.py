"""Turns MODEL into a directory: only here is anything fetched from the hub, services see files."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from deploy.errors import LaunchError

HUB = "hub:"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_REVISION = re.compile(r"(?!.*\.\.)[\w./-]+")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# The files that the services read, none of which has to be unpickled.
_FILES = ("*.safetensors", "*.json", "*.jinja", "merges.txt", "vocab.txt")


def resolve_model(model: str) -> Path:
    """Returns the directory that `model` is or, if it is `hub:OWNER/NAME@REVISION`, the one with
    the files of that Hugging Face repository at that commit, branch or tag. For a branch or tag,
    whose files may change, it says on stderr which commit that was.

    Raises:
        LaunchError: it is neither, or cannot be downloaded.
    """
    if model.startswith(HUB):
        return _from_hub(model)
    directory = Path(model).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise LaunchError(f"MODEL: {model} holds no config.json")
        return directory
    hint = ""
    if _HUB_ID.fullmatch(model) and not directory.exists():
        hint = f"; from the hub it is {HUB}{model}@REVISION"
    raise LaunchError(f"MODEL: {model} is no directory{hint}")


def model_name(model: str, directory: Path) -> str:
    """The default name of `model`, which is in `directory`, for its clients: OWNER/NAME of the hub,
    or the directory's name."""
    if model.startswith(HUB):
        return model.removeprefix(HUB).partition("@")[0]
    return directory.resolve().name


def _from_hub(model: str) -> Path:
    hub_id, _, revision = model.removeprefix(HUB).partition("@")
    if not _HUB_ID.fullmatch(hub_id):
        raise LaunchError(f"MODEL: {model} is not {HUB}OWNER/NAME@REVISION")
    if not _REVISION.fullmatch(revision):
        raise LaunchError(
            f"MODEL: {model} names no revision: {HUB}{hub_id}@REVISION, where REVISION is the 40 "
            "hexadecimal digits of a commit, which pin the files, or a branch or tag such as main, "
            "whose files may change"
        )
    directory = _download(model, hub_id, revision)
    if not _COMMIT.fullmatch(revision):
        print(
            f"{model} is now the commit {directory.name}; "
            f"MODEL={HUB}{hub_id}@{directory.name} keeps to it",
            file=sys.stderr,
        )
    return directory


def _download(model: str, hub_id: str, revision: str) -> Path:
    # Imported here: the import is slow, and a directory does not need it.
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=list(_FILES)))
    except Exception as error:  # from the hub, its HTTP library or the operating system
        reason = str(error).strip().partition("\n")[0]
        raise LaunchError(f"MODEL: {model} cannot be downloaded: {reason}") from error
