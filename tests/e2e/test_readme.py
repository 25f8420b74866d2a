"""README's commands and programs, in their order, as a reader pastes them: at the ports that they
name, in a network of their own, where nothing else can have taken them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from deploy.native.processes import stack_members
from deploy.stack import run_directory
from tests.faults.network import missing
from tests.others import others_python
from tests.stack import ROOT, kill_all

BLOCKS = re.findall(r"^```(sh|python)\n(.*?)^```$", (ROOT / "README.md").read_text(), re.S | re.M)
STACK = ROOT / run_directory(50051)
FILES = ("prompts.jsonl", "completions.jsonl")  # that README has made
# What a shell has; make hands its variables (ARGS) to every make below it.
ENVIRONMENT = {name: os.environ[name] for name in ("PATH", "HOME")}


@pytest.fixture
def network() -> Iterator[list[str]]:
    """The beginning of a command line that runs in a network of its own."""
    if reason := missing():
        pytest.skip(reason)
    if stack_members(STACK):
        pytest.skip("a stack runs on port 50051")
    if taken := [name for name in FILES if (ROOT / name).exists()]:
        pytest.skip(f"{taken} would be overwritten")
    name = f"nano-readme-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    enter = ["ip", "netns", "exec", name]
    try:
        subprocess.run([*enter, "ip", "link", "set", "lo", "up"], check=True)
        yield enter
    finally:
        kill_all(STACK)
        subprocess.run(["ip", "netns", "delete", name], check=True)
        for file in FILES:
            (ROOT / file).unlink(missing_ok=True)


def test_every_block_works_as_pasted(network: list[str]) -> None:
    ran = []
    for language, text in BLOCKS:
        if text.startswith("grpcurl") and not shutil.which("grpcurl"):
            continue  # Debian has none; clients in other tests make the same call
        command = ["bash", "-ec", text]
        if language == "python":
            python = others_python() if "openai" in text else ROOT / ".venv/bin/python"
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
        ran.append(done.stdout)
    assert "Once upon a time" in ran[0]  # make up
    assert len((ROOT / "completions.jsonl").read_text().splitlines()) == 2
    assert "stopped" in ran[-1]  # make down
    assert not stack_members(STACK)
