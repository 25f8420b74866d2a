"""Runs the examples as they are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.client.fake_server import FakeServer

EXAMPLES = Path(__file__).parents[2] / "examples"

# Part of what each one prints. The server's completions shift characters along the alphabet.
EXPECTED = {
    "generate.py": "'Xibu!jt!28!,!36@'",  # What is 17 + 25?
    "stream.py": "Podf!vqpo!b!ujnf",
    "chat.py": "> Tell me a story.",
    "async_many.py": "an empty prompt: INVALID_ARGUMENT",
    "plain_grpc.py": "Podf!vqpo!b!ujnf",
    "several.py": "2   -2.500 'Rqfh#xsrq#d#wlph'",  # the last of the beams
    "structured_output.py": "Podf!vqpo!b!ujnf",
}


def test_all_examples_are_tested() -> None:
    # examples/private_stack.py needs a real stack: test_private_stack.py runs what it shows.
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*EXPECTED, "private_stack.py"}


@pytest.mark.parametrize("name", EXPECTED)
def test_example(server: FakeServer, name: str) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, server.address],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert EXPECTED[name] in done.stdout
