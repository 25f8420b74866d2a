"""The environment of a stack's processes, which its directory keeps for the next supervisor."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from pydantic import TypeAdapter

from deploy.errors import LaunchError
from deploy.plan import Environment
from deploy.stack import open_file, replace_file
from shared.config import PREFIX

ENVIRONMENT_FILE = "environment"
_ENVIRONMENT = TypeAdapter(Environment)
_PROXIES = "http_proxy", "https_proxy", "no_proxy", "all_proxy"
# Besides the usual ones, those that this project's services read: where caches are, with which
# compiler workers make kernels, and over which networks ranks talk.
_NAMES = (
    *("PATH", "HOME", "LANG", "LD_LIBRARY_PATH", *_PROXIES, *map(str.upper, _PROXIES)),
    *("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "CXX", "GLOO_SOCKET_IFNAME"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
_PREFIXES = (PREFIX, "CUDA_", "HF_", "NCCL_")


def kept_environment(environment: Environment) -> Environment:
    """Returns the variables that the processes of a stack get, whichever supervisor starts them.
    Others, such as LD_PRELOAD or PYTHONPATH, could change the programs."""
    return {
        name: value
        for name, value in environment.items()
        if name in _NAMES or name.startswith(_PREFIXES)
    }


def save_environment(directory: Path, environment: Environment) -> None:
    """Writes the environment of a stack's processes; it may have secrets.

    Raises:
        LaunchError: it cannot be written.
    """
    text = _ENVIRONMENT.dump_json(kept_environment(environment), indent=1).decode()
    replace_file(directory / ENVIRONMENT_FILE, text)


def load_environment(directory: Path) -> Environment:
    """Returns the environment of a stack's processes.

    Raises:
        LaunchError: there is none, or other users may have read or written it.
    """
    path = directory / ENVIRONMENT_FILE
    try:
        with open(open_file(path), "rb") as file:
            if os.fstat(file.fileno()).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise LaunchError(f"{path} is open to other users; chmod 600 allows its use")
            return kept_environment(_ENVIRONMENT.validate_json(file.read()))
    except (FileNotFoundError, ValueError) as error:
        raise LaunchError(f"{path} is missing or damaged; make down ends the stack") from error
