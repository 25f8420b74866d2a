"""A private stack, with a launcher that honours the contract of `python -m cli run`."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nano_vllm_grpc import LLM, PrivateStack, StackError
from tests.client.fake_server import FakeServer

LAUNCHER = """
import pathlib, sys
here = pathlib.Path.cwd()
(here / "flags").write_text(" ".join(sys.argv[1:]))
if "bad" in sys.argv[-1]:
    print("noise", file=sys.stderr)
    sys.exit("cannot start: reason='no such model'")
print("starting", flush=True)
print("READY", (here / "address").read_text(), flush=True)
sys.stdin.read()
(here / "stopped").write_text("yes")
"""


@pytest.fixture
def cwd(server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "cli").mkdir()
    (tmp_path / "cli" / "__init__.py").touch()
    (tmp_path / "cli" / "__main__.py").write_text(LAUNCHER)
    (tmp_path / "address").write_text(server.address)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_llm_starts_a_stack_and_stops_it(cwd: Path) -> None:
    with LLM(model="models/demo", tp=2, max_num_seqs=8) as llm:
        assert llm.generate("a", use_tqdm=False)[0]["text"] == "b" * 8
        assert not (cwd / "stopped").exists()
    assert (cwd / "stopped").exists()
    assert (cwd / "flags").read_text() == (
        "run --port 0 --model models/demo --tp 2 --max-num-seqs 8"
    )


def test_a_dropped_llm_stops_its_stack(cwd: Path) -> None:
    llm = LLM(model="models/demo")
    assert llm.tokenize("a") == [97]
    del llm
    gc.collect()
    assert (cwd / "stopped").exists()


def test_the_end_of_the_program_stops_its_stack(cwd: Path) -> None:
    script = "from nano_vllm_grpc import LLM; llm = LLM(model='m'); llm.tokenize('a')"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    assert (cwd / "stopped").exists()


def test_killing_the_program_stops_its_stack(cwd: Path) -> None:
    os.mkfifo(cwd / "stopped")  # its reader waits for the launcher to write
    script = (
        "import os; from nano_vllm_grpc import LLM; llm = LLM(model='m'); llm.tokenize('a');"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", script], timeout=60)
    assert done.returncode == -9
    assert (cwd / "stopped").read_text() == "yes"


def test_the_launchers_reason_is_shown(cwd: Path) -> None:
    with pytest.raises(StackError, match="no such model") as caught:
        PrivateStack("bad")
    assert caught.value.code is None
