"""The TypeScript example, compiled from the protos alone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from nano_vllm_grpc import LLM, Message, SamplingParams
from tests.client.fake_server import running_server
from tests.frontend.conftest import link_with_qwen3_template
from tests.others import node_modules
from tests.stack import ROOT, running_stack

pytestmark = pytest.mark.skipif(not shutil.which("npm"), reason="npm is not installed")


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's folder in a copy of the checkout, built as its readers build it."""
    checkout = tmp_path_factory.mktemp("checkout")
    folder = checkout / "examples" / "typescript"
    ignored = shutil.ignore_patterns("node_modules", "dist", "gen")
    shutil.copytree(ROOT / "examples" / "typescript", folder, ignore=ignored)
    shutil.copytree(ROOT / "protos", checkout / "protos")
    (folder / "node_modules").symlink_to(node_modules())
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
    """The texts are those that the Python client gets, from a model that is greedy by default."""
    link_with_qwen3_template(tmp_path)
    defaults = tmp_path / "generation_config.json"
    text = defaults.read_text()
    defaults.unlink()
    defaults.write_text(json.dumps(json.loads(text) | {"temperature": 0}))
    call = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    messages: list[Message] = [
        {"role": "user", "content": "How warm is it in Paris?"},
        {"role": "assistant", "tool_calls": [{"id": "call_1", "function": call}]},
        {"role": "tool", "tool_call_id": "call_1", "content": '{"celsius": 21}'},
    ]
    tools = json.loads(
        """{"type": "function", "function": {"name": "get_weather",
        "description": "The weather in a city", "parameters": {"type": "object",
        "properties": {"city": {"type": "string"}}, "required": ["city"]}}}"""
    )
    params = SamplingParams(max_tokens=64)
    with running_stack(model=tmp_path) as stack:
        answers = run(example, stack.address)
        with LLM(stack.address) as llm:
            (completion,) = llm.generate("Once upon a time", params, use_tqdm=False)
            (reply,) = llm.chat(messages, params, tools=[tools], use_tqdm=False)
    assert answers == [f"{completion['text']}\n", f"{reply['text']}\n"]


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
