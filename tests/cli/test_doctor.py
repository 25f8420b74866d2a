"""`doctor`: what it finds on machines, ports and models that are sound, and on others."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cli.doctor import host
from deploy.native.processes import MARKER, NAME
from deploy.ports import free_port
from tests.stack import DEMO_MODEL
from tests.worker_svc.device import cpu_only


def doctor(*options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cli", "doctor", *map(str, options)]
    environment = {**os.environ, "COLUMNS": "300"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)


def test_nothing_is_wrong_with_the_demo_model() -> None:
    done = doctor("--model", DEMO_MODEL, "--port", free_port(), "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "wrong" not in done.stdout
    for name in ("open files", "disk", "cores", "port", "settings"):
        assert f"  {name} " in done.stdout


def test_a_busy_port_and_impossible_settings() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        done = doctor("--port", port, "--model", DEMO_MODEL, "--max-num-seqs", "none")
    assert done.returncode == 1
    lines = [line for line in done.stdout.splitlines() if line.startswith("wrong")]
    assert f"Address already in use, pid {os.getpid()}" in lines[0]
    assert "use another PORT" in lines[0]
    assert "max_num_seqs: Input should be a valid integer" in lines[1]
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("", "make down PORT={}"), ("frontend-0", "make up PORT={} starts one")],
)
def test_leftover_processes_and_a_stack_without_a_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, remedy: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as serving:
        port = serving.getsockname()[1]
        directory = tmp_path / ".run" / str(port)
        directory.mkdir(parents=True)
        assert list(host.check_stacks()) == []
        left = subprocess.Popen(
            [sys.executable, "-c", "input()"],
            env={**os.environ, MARKER: str(directory), **({NAME: name} if name else {})},
            stdin=subprocess.PIPE,
        )
        (found,) = host.check_stacks()
        assert host.check_port("127.0.0.1", port).state == ("ok" if name else "wrong")
        left.communicate()
    assert (found.state, found.remedy) == ("warning", remedy.format(port))


def test_a_broken_model(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, model)
    index = {"weight_map": {"model.norm.weight": "model-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    done = doctor("--model", model, "--port", free_port())
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("wrong")]
    assert "names model-00002.safetensors, which does not exist" in line


@cpu_only
def test_memory_of_a_gpu_that_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(host.check_kept_memory()) == []  # torch is built for a CPU
    monkeypatch.setattr(host, "_KEEP", "raise RuntimeError('said CUDA')")
    (check,) = host.check_kept_memory()
    assert check.state == "warning"
    assert check.found == "a killed worker loads its weights again: RuntimeError: said CUDA"
    monkeypatch.setattr(host, "_MAX_GPU_S", 0.1)
    monkeypatch.setattr(host, "_KEEP", "import time; time.sleep(100)")
    (check,) = host.check_kept_memory()
    assert "the GPU does not answer" in check.found
