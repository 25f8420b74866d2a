"""The TypeScript example, compiled from the protos alone."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.client.fake_server import running_server
from tests.frontend.conftest import link_with_qwen3_template
from tests.stack import ROOT, running_stack

NO_REGISTRY = re.compile("ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ECONNRESET|ETIMEDOUT|ENETUNREACH")

pytestmark = pytest.mark.skipif(not shutil.which("npm"), reason="npm is not installed")


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's folder in a copy of the checkout, built as its readers build it."""
    checkout = tmp_path_factory.mktemp("checkout")
    folder = checkout / "examples" / "typescript"
    ignored = shutil.ignore_patterns("node_modules", "dist", "gen")
    shutil.copytree(ROOT / "examples" / "typescript", folder, ignore=ignored)
    shutil.copytree(ROOT / "protos", checkout / "protos")
    install = ["npm", "ci", "--prefer-offline", "--ignore-scripts"]
    done = subprocess.run(install, cwd=folder, capture_output=True, text=True)
    if NO_REGISTRY.search(done.stderr):
        pytest.skip(f"npm ci finds no registry: {done.stderr.splitlines()[0]}")
    assert done.returncode == 0, done.stderr
    build = subprocess.run(["npm", "run", "build"], cwd=folder, capture_output=True, text=True)
    assert build.returncode == 0, build.stdout + build.stderr
    return folder


def run(example: Path, address: str) -> list[str]:
    """Runs the example -> its output: a title and an answer, twice."""
    done = subprocess.run(
        ["node", "dist/main.js", address], cwd=example, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    _, *answers = re.split("^> .*\n", done.stdout, flags=re.M)
    return answers


def test_a_completion_and_a_chat_with_tools(example: Path, tmp_path: Path) -> None:
    link_with_qwen3_template(tmp_path)
    with running_stack(model=tmp_path) as stack:
        completion, answer = run(example, stack.address)
    assert len(completion) > 20
    assert answer.strip()
    assert "INVALID_ARGUMENT" not in answer


def test_a_stream_that_is_cut_goes_on(example: Path) -> None:
    with running_server() as server:
        server.service.cuts.extend([20, 0])
        completion, _ = run(example, server.address)
        whole, after_20, again, chat = server.service.requests
    assert completion == ("Podf!vqpo!b!ujnf" * 4) + "\n"
    assert not whole.resume_token_ids
    assert list(after_20.resume_token_ids) == list(again.resume_token_ids)
    assert len(again.resume_token_ids) == 20
    assert whole.sampling.seed == again.sampling.seed
    assert [message.role for message in chat.chat.messages] == ["user", "assistant", "tool"]
    assert chat.chat.tools
