"""`doctor`: what it finds on machines, ports and models that are sound, and on others."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.doctor import host
from cli.doctor.engine import checks
from deploy.native.processes import MARKER, NAME
from deploy.ports import free_port
from tests.stack import DEMO_MODEL
from worker_svc.errors import StartError
from worker_svc.kernels.cpu import library
from worker_svc.settings import WorkerSettings


def doctor(*options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cli", "doctor", *map(str, options)]
    environment = {**os.environ, "COLUMNS": "300"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110)


def test_nothing_is_wrong_with_the_demo_model() -> None:
    done = doctor("--model", DEMO_MODEL, "--port", free_port(), "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "wrong" not in done.stdout
    names = "port", "torch", "device", "kernels", "model", "gateway", "attention", "weights"
    for name in (*names, "memory", "tokenizer"):
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


def test_leftover_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / ".run" / "50051"
    directory.mkdir(parents=True)
    assert list(host.check_stacks()) == []
    left = subprocess.Popen(
        [sys.executable, "-c", "input()"],
        env={**os.environ, MARKER: str(directory)},
        stdin=subprocess.PIPE,
    )
    (found,) = host.check_stacks()
    left.communicate()
    assert (found.state, found.remedy) == ("warning", "make down PORT=50051")


def test_a_stack_without_a_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as serving:
        port = serving.getsockname()[1]
        directory = tmp_path / ".run" / str(port)
        directory.mkdir(parents=True)
        left = subprocess.Popen(
            [sys.executable, "-c", "input()"],
            env={**os.environ, MARKER: str(directory), NAME: "frontend-0"},
            stdin=subprocess.PIPE,
        )
        (found,) = host.check_stacks()
        assert host.check_port("127.0.0.1", port).state == "ok"
        left.communicate()
    assert (found.state, found.remedy) == ("warning", f"make up PORT={port} starts one")


def cut_weights(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def name_a_missing_file(model: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "model-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def name_a_missing_tensor(model: Path) -> None:
    index = {"weight_map": {"model.other.weight": "model.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def change_config(**values: object) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        path = model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def forget_the_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()


def forget_the_template(model: Path) -> None:
    path = model / "tokenizer_config.json"
    values = json.loads(path.read_text())
    del values["chat_template"]
    path.write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("harm", "name", "state", "found"),
    [
        (cut_weights, "weights", "wrong", "cut short"),
        (name_a_missing_file, "weights", "wrong", "names model-00002.safetensors, which does not"),
        (
            name_a_missing_tensor,
            "weights",
            "wrong",
            "model.other.weight is not in model.safetensors",
        ),
        (change_config(architectures=["Llama"]), "model", "wrong", "Llama is not served"),
        (change_config(max_position_embeddings=1 << 40), "memory", "wrong", "MiB short"),
        (change_config(intermediate_size=1 << 40), "memory", "wrong", "GiB are free"),
        (forget_the_tokenizer, "tokenizer", "wrong", "the model has 1536"),
        (forget_the_template, "tokenizer", "warning", "no chat template"),
    ],
)
def test_a_broken_model(
    harm: Callable[[Path], None], name: str, state: str, found: str, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, model)
    harm(model)
    settings = WorkerSettings(model=str(model), device="cpu")
    others = [each for each in checks(settings, ["worker", "frontend"]) if each.state != "ok"]
    assert [(each.name, each.state) for each in others] == [(name, state)]
    assert found in others[0].found
    assert others[0].remedy


def test_settings_that_the_model_does_not_allow() -> None:
    settings = WorkerSettings(model=str(DEMO_MODEL), device="cpu", max_model_len=4096)
    *_, found = checks(settings, ["worker"])
    assert (found.name, found.state) == ("settings", "wrong")
    assert "4096 is over the model's 2048" in found.found


def test_the_cpu_kernels_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise StartError("there is no C++ compiler")

    monkeypatch.setattr(library, "library", fail)
    settings = WorkerSettings(model=str(DEMO_MODEL), device="cpu")
    (found,) = (each for each in checks(settings, ["worker"]) if each.state != "ok")
    assert (found.name, found.state) == ("kernels", "wrong")
    assert found.found == "there is no C++ compiler"
    assert "apt install g++" in found.remedy
