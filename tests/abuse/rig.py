"""A private stack of one frontend, with two clients by token, and honest ones at work on it."""

from __future__ import annotations

import json
import resource
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.abuse.attack import Interface
from tests.abuse.child import Child
from tests.abuse.figures import Figures
from tests.abuse.observer import observe
from tests.stack import DEMO_MODEL, RealStack, running_stack

HONEST_TOKEN = "honest-client-0123456789"
ATTACKERS_TOKEN = "attacker-0123456789"
# A usual limit for shells: attacks on descriptors must not need tens of thousands.
_DESCRIPTORS = 1024
_MAX_MODEL_LEN = 40_960  # tokens, as Qwen3's: the demo model's own 2,048 would spare the server


@dataclass(frozen=True)
class Rig:
    """A stack, and the process of its honest clients."""

    stack: RealStack
    observer: Child
    attackers_token: str  # empty: the frontend asks for none

    @property
    def anonymous(self) -> bool:
        return not self.attackers_token

    def address(self, interface: Interface) -> str:
        """The address of an interface, as `host:port`."""
        stack = self.stack.stack
        match interface:
            case "grpc" | "reflection":
                return stack.address
            case "http":
                return urlsplit(stack.url).netloc
            case "dashboard":
                return urlsplit(stack.dashboard_url).netloc

    def begin(self) -> None:
        """Begins a window."""
        self.observer.send("begin")
        self.observer.receive()

    def end(self) -> Figures:
        self.observer.send("end")
        figures: Figures = self.observer.receive()
        return figures


@contextmanager
def running_rig(*, anonymous: bool) -> Iterator[Rig]:
    """Runs a stack and its honest clients, who know the right answers when this returns. If
    anonymous, it serves HTTP, the dashboard and reflection, too."""
    with tempfile.TemporaryDirectory(prefix="nano-abuse") as name, ExitStack() as started:
        directory = Path(name)
        variables: dict[str, Any] = {"model": _long_model(directory), "dtype": "float32"}
        if anonymous:
            variables |= {"http_port": "auto", "ui_port": "auto"}
        else:
            variables["auth_tokens_file"] = _tokens_file(directory)
        with _few_descriptors():
            stack = started.enter_context(running_stack(**variables))
        token = "" if anonymous else HONEST_TOKEN
        child = Child(observe, stack.address, stack.stack.scheduler_address, token)
        observer = started.enter_context(child)
        observer.receive()
        yield Rig(stack, observer, "" if anonymous else ATTACKERS_TOKEN)


def _tokens_file(directory: Path) -> Path:
    """Writes the file that says who the clients are: a token per line."""
    path = directory / "tokens"
    path.write_text(f"{HONEST_TOKEN}\n{ATTACKERS_TOKEN}\n", encoding="utf-8")
    path.chmod(0o600)
    return path


def _long_model(directory: Path) -> Path:
    """Copies the demo model as one that takes long prompts; what it says then does not matter."""
    copy = directory / "model"
    shutil.copytree(DEMO_MODEL, copy)
    config = json.loads((copy / "config.json").read_text())
    config["max_position_embeddings"] = _MAX_MODEL_LEN
    (copy / "config.json").write_text(json.dumps(config))
    return copy


@contextmanager
def _few_descriptors() -> Iterator[None]:
    """Gives processes that start in the meantime the usual limit of descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(_DESCRIPTORS, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
