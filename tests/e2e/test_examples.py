"""The commands and programs of README and of docs/use, in the order of their page, as a reader
pastes them: at the ports that they name, in a network of their own, where nothing else can have
taken them. A block after the line `<!-- not run: REASON -->` is left out."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.native.processes import stack_members
from deploy.stack import run_directory
from tests.faults.network import missing
from tests.others import others_python
from tests.stack import ROOT, kill_all

BLOCK = re.compile(r"^(<!-- not run: .+ -->\n)?```(sh|python)\n(.*?)^```$", re.S | re.M)
PAGES = sorted((ROOT / "docs" / "use").glob("*.md"))
STACK = ROOT / run_directory(50051)
# What a shell has; make hands its variables (ARGS) to every make below it.
ENVIRONMENT = {name: os.environ[name] for name in ("PATH", "HOME")}
OF_OTHERS = re.compile(r"^(from|import) (openai|anthropic)", re.M)


@pytest.fixture(scope="module")
def network() -> Iterator[list[str]]:
    """The beginning of a command line that runs in a network of its own."""
    if reason := missing():
        pytest.skip(reason)
    if stack_members(STACK):
        pytest.skip("a stack runs on port 50051")
    name = f"nano-examples-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    enter = ["ip", "netns", "exec", name]
    before = set(ROOT.iterdir())
    try:
        subprocess.run([*enter, "ip", "link", "set", "lo", "up"], check=True)
        yield enter
    finally:
        kill_all(STACK)
        subprocess.run(["ip", "netns", "delete", name], check=True)
        for made in {path for path in ROOT.iterdir() if path.is_file()} - before:
            made.unlink()


@pytest.fixture(scope="module")
def stack(network: list[str]) -> list[str]:
    """The network with a stack, as `make up` starts it."""
    run(network, "sh", "make up")
    return network


def run(network: list[str], language: str, text: str) -> str:
    command = ["bash", "-ec", text]
    if language == "python":
        python = others_python() if OF_OTHERS.search(text) else ROOT / ".venv/bin/python"
        command = [str(python), "-c", text]
    done = subprocess.run(
        [*network, *command],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (text, done.stdout, done.stderr)
    return done.stdout


def run_page(network: list[str], page: Path) -> list[str]:
    """Runs the blocks of a page -> what each has printed."""
    blocks = [
        (language, text) for left, language, text in BLOCK.findall(page.read_text()) if not left
    ]
    assert blocks
    # Debian has no grpcurl; clients in other tests make the same calls.
    has_grpcurl = shutil.which("grpcurl")
    return [
        run(network, language, text)
        for language, text in blocks
        if has_grpcurl or not re.search(r"^grpcurl", text, re.M)
    ]


def test_readme(network: list[str]) -> None:
    ran = run_page(network, ROOT / "README.md")
    assert "Once upon a time" in ran[0]  # make up
    assert len((ROOT / "completions.jsonl").read_text().splitlines()) == 2
    assert "stopped" in ran[-1]  # make down
    assert not stack_members(STACK)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page(stack: list[str], page: Path) -> None:
    run_page(stack, page)
