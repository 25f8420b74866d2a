"""`generate`: files of requests against a server whose tokens are known, and against a real one."""

from __future__ import annotations

import fcntl
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cli.app import app
from nano_vllm_grpc import LLM, SamplingParams
from tests.client.fake_server import FakeServer, running_server
from tests.stack import running_stack
from tests.waiting import wait_for

TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running_server() as running:
        yield running


class Files:
    """An input and its outputs."""

    def __init__(self, directory: Path) -> None:
        self.requests = directory / "in.jsonl"
        self.output = directory / "out.jsonl"
        self.errors = directory / "out.errors.jsonl"

    def write(self, *lines: Any) -> None:
        """Texts are lines as they are, anything else is written in JSON."""
        texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
        self.requests.write_text("".join(f"{text}\n" for text in texts))

    def generate(self, address: str, *options: str) -> Result:
        words = ["generate", str(self.requests), str(self.output), "--address", address, *options]
        return CliRunner().invoke(app, words)

    def results(self) -> dict[Any, dict[str, Any]]:
        """The output's records by id, each of which is there once."""
        records = [json.loads(line) for line in self.output.read_text().splitlines()]
        assert len({each["id"] for each in records}) == len(records)
        return {each.pop("id"): each for each in records}

    def failures(self) -> dict[Any, str]:
        records = [json.loads(line) for line in self.errors.read_text().splitlines()]
        return {each["id"]: each["error"] for each in records}


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def test_every_kind_of_line(server: FakeServer, files: Files) -> None:
    openai = {"model": "any", "messages": [{"role": "user", "content": "d"}], "stop": None}
    files.write(
        '"a"',
        "",
        {"id": "x", "token_ids": [98], "max_tokens": 2, "seed": 1},
        {"id": "\ud800", "prompt": "é"},
        {"id": 7, "messages": [{"role": "user", "content": "c"}], "n": 2},
        {"id": "t", "messages": [{"role": "user", "content": "t"}], "tools": [TOOL]},
        {"custom_id": "o", "method": "POST", "body": {**openai, "max_completion_tokens": 3}},
    )
    done = files.generate(server.address, "--params", '{"max_tokens": 4}', "--token-ids")
    assert done.exit_code == 0, done.output
    assert "6 of 6 requests are done, 0 of them earlier" in done.stderr
    results = files.results()
    assert results["x"] == {
        "text": "dd",
        "token_ids": [100, 100],
        "finish_reason": "length",
        "usage": {"prompt_tokens": 1, "cached_prompt_tokens": 0, "completion_tokens": 2},
    }
    assert results[1]["text"] == "bbbb"  # the first line, with the default
    assert [each["text"] for each in results[7]["completions"]] == ["dddd", "eeee"]
    assert results["o"]["text"] == "eee"
    (with_tool,) = (each for each in server.service.requests if each.chat.tools)
    assert json.loads(with_tool.chat.tools[0]) == TOOL
    assert results["\ud800"]["text"] == "êêêê"


def test_a_bad_line_fails_alone_and_is_tried_again(server: FakeServer, files: Files) -> None:
    bad = [
        {"id": "typo", "prompt": "b", "max_tokns": 3},
        {"id": "type", "prompt": "b", "max_tokens": "many"},
        {"id": "refused", "prompt": ""},
        {"id": "both", "prompt": "b", "token_ids": [1]},
        {"id": "good", "prompt": "again"},
        "{oops",
    ]
    files.write({"id": "good", "prompt": "a"}, *bad)
    done = files.generate(server.address)
    assert done.exit_code == 1
    assert "1 of 7 requests are done, 0 of them earlier; 6 failed" in done.stderr
    assert files.results().keys() == {"good"}
    failures = files.failures()
    assert failures["typo"] == "unknown fields: max_tokns"
    assert failures["type"].startswith("max_tokens: Input should be a valid integer")
    assert failures["refused"].startswith("INVALID_ARGUMENT: prompt: is empty")
    assert failures["both"].startswith("prompt and token_ids given")
    assert failures["good"] == "id: 'good' is also the id of line 1"
    assert failures[7].startswith("not JSON")

    server.service.requests.clear()
    files.write({"id": "good", "prompt": "a"}, {"id": "typo", "prompt": "b", "max_tokens": 3})
    done = files.generate(server.address)
    assert done.exit_code == 0, done.output
    assert "2 of 2 requests are done, 1 of them earlier" in done.stderr
    assert [each.text for each in server.service.requests] == ["b"]
    assert files.results()["typo"]["text"] == "ccc"
    assert not files.errors.exists()


def test_half_a_line_is_written_again(server: FakeServer, files: Files) -> None:
    files.write('"a"', '"b"')
    whole = '{"id": 1, "text": "kept"}\n'
    files.output.write_text(whole + '{"id": 2, "text": "hal')
    assert files.generate(server.address).exit_code == 0
    assert files.output.read_text().startswith(whole)
    assert files.results()[2]["text"] == "c" * 8


@pytest.mark.parametrize("text", ["my thesis", "my thesis\n", '{"a": 1}\n', "[1]\n"])
def test_another_file_is_not_written_to(server: FakeServer, files: Files, text: str) -> None:
    files.write('"a"')
    files.output.write_text(text)
    done = files.generate(server.address)
    assert (done.exit_code, files.output.read_text()) == (1, text)
    assert "out.jsonl: not an output of generate" in done.stderr


def test_one_writer_at_a_time(server: FakeServer, files: Files) -> None:
    files.write('"a"')
    with files.output.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        done = files.generate(server.address)
    assert done.exit_code == 1
    assert "another process is writing it" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--params", "{"], "--params: not JSON"),
        (["--params", '{"temprature": 1}'], "--params: unknown fields: temprature"),
        (["--concurrency", "0"], "--concurrency"),
        (["--address", "127.0.0.1:1"], "the server does not accept requests: UNAVAILABLE"),
    ],
)
def test_a_batch_that_cannot_start(
    server: FakeServer,
    files: Files,
    options: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nano_vllm_grpc.retry._FIRST_CONTACT_S", 0)
    files.write('"a"')
    done = files.generate(server.address, *options)
    assert done.exit_code != 0
    assert message in done.stderr
    assert "Traceback" not in done.output


def test_requests_in_flight_are_bounded(server: FakeServer, files: Files) -> None:
    server.service.start_together = 3
    files.write(*(f'"{letter}"' for letter in "abcdefgh"))
    assert files.generate(server.address, "--concurrency", "3").exit_code == 0
    assert server.service.max_in_flight == 3
    assert len(files.results()) == 8


@pytest.mark.system
def test_interrupted_batches_continue(files: Files) -> None:
    prompts = [f"Once upon a time there were {n} foxes" for n in range(40)]
    params = {"max_tokens": 48, "temperature": 0, "ignore_eos": True}
    files.write(*({"prompt": prompt, **params} for prompt in prompts))
    with running_stack(speculation="none") as stack:
        command = [sys.executable, "-m", "cli", "generate", files.requests, files.output]
        command += ["--address", stack.address, "--concurrency", "2"]

        def lines() -> int:
            return files.output.read_bytes().count(b"\n") if files.output.exists() else 0

        for number in (signal.SIGKILL, signal.SIGINT):
            before = lines()
            stack.hold.after(4 * 48)  # steps for 2 to 8 results, besides those in flight
            run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
            wait_for(lambda before=before: lines() >= before + 2, "some results")
            run.send_signal(number)
            _, shown = run.communicate()
            assert run.returncode == {signal.SIGKILL: -9, signal.SIGINT: 130}[number], shown
        assert "run the same command to continue" in shown
        assert lines() < len(prompts)

        stack.hold.after(4 * 48)
        run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        before = lines()
        wait_for(lambda: lines() > before, "a result")
        stack.kill("worker")
        stack.hold.release()
        _, shown = run.communicate()
        assert run.returncode == 0, shown
        with LLM(stack.address) as llm:
            expected = llm.generate(prompts, SamplingParams(**params), use_tqdm=False)
    results = files.results()
    assert results.keys() == set(range(1, 41))
    assert [results[n + 1]["text"] for n in range(40)] == [each["text"] for each in expected]
