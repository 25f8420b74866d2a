"""The commands that the Makefile's targets run."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
CLI = ".venv/bin/nano-vllm-grpc"
DISTRIBUTED = ("-n", "auto", "--dist", "loadgroup")


def make(*arguments: str, **environment: str) -> str:
    """The output of make, isolated from any make that is running this test."""
    return subprocess.run(
        ["make", *arguments],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"]} | environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def last_command(*arguments: str, **environment: str) -> list[str]:
    """The words of the last command that make would run."""
    output = make("--dry-run", *arguments, **environment)
    return shlex.split(output.replace("\\\n", " ").splitlines()[-1])


def test_only_variables_that_are_set_are_passed() -> None:
    assert last_command("up") == [CLI, "up"]
    words = last_command("up", "MODEL=/my 'models'/x", "MAX_NUM_SEQS=4", "RUNTIME=docker")
    assert words[2:] == [
        *("--model", "/my 'models'/x"),
        *("--max-num-seqs", "4"),
        *("--runtime", "docker"),
    ]


def test_variables_may_come_from_the_environment_except_the_shells_own_host() -> None:
    assert last_command("up", PORT="6000", HOST="my-laptop")[2:] == ["--port", "6000"]
    assert last_command("up", "HOST=::1", HOST="my-laptop")[2:] == ["--host", "::1"]


def test_out_must_be_given_to_make(tmp_path: Path) -> None:
    """Some shells export an OUT, which may be any directory."""
    for target in ("gpu-check", "bench", "chaos", "abuse"):
        assert "--out" not in last_command(target, OUT=str(tmp_path))
        assert last_command(target, "OUT=a b", OUT=str(tmp_path))[-2:] == ["--out", "a b"]


def test_unknown_variables_are_refused() -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        make("--dry-run", "up", "MAX_NUM_SEQ=64")
    assert "MAX_NUM_SEQ: unknown variable" in refused.value.stderr
    assert "MAX_NUM_SEQS" in refused.value.stderr
    # Words of values are no variables.
    assert last_command("test", "ARGS=-k a NAME=b ATTACKS=c")[-3:] == ["a", "NAME=b", "ATTACKS=c"]


def test_gpu_check() -> None:
    words = last_command("gpu-check", "OUT=results", "ARGS=prove --seed 7")
    assert words[1:] == ["-m", "bench.gpu", "--out", "results", "prove", "--seed", "7"]
    assert last_command("gpu-check", "GPU_PYTHON=python3") == ["python3", "-m", "bench.gpu"]


def test_generate_and_doctor() -> None:
    generate = last_command("generate", "IN=a b", "OUT=c", "PORT=6000", "ARGS=--concurrency 4")
    assert generate[1:] == [
        *("generate", "a b", "c", "--address", "127.0.0.1:6000", "--concurrency", "4"),
    ]
    doctor = last_command("doctor", "MODEL=m", "RUNTIME=docker", "TP=2")
    assert doctor == [CLI, "doctor", "--model", "m", "--tp", "2"]


def test_chat_and_bench() -> None:
    chat = last_command("chat", "PORT=6000")
    assert chat == [CLI, "chat", "--address", "127.0.0.1:6000"]
    bench = last_command("bench", "MODE=stack", "OUT=a.json", "TP=2", "ARGS=--num-seqs 4")
    assert bench[0] == "NANO_TP=2"
    assert bench[2:] == [
        *("bench", "--mode", "stack", "--out", "a.json", "--num-seqs", "4"),
    ]


def test_chaos() -> None:
    words = last_command("chaos", "FAULTS=200", "SEED=4", "OUT=a.json")
    expected = ["-m", "tests.chaos", "--faults", "200", "--seed", "4", "--out", "a.json"]
    assert words[1:] == expected


def test_abuse() -> None:
    words = last_command("abuse", "ATTACK=half-sent no-token", "CHECK=2", "ARGS=--rounds 1")
    expected = ["--attack", "half-sent", "no-token", "--check", "2", "--rounds", "1"]
    assert words[1:] == ["-m", "tests.abuse", *expected]


def test_restart() -> None:
    words = last_command("restart", "PORT=6000", "SERVICE=worker_svc")
    assert words == [CLI, "restart", "--port", "6000", "--service", "worker_svc"]


def test_scale() -> None:
    words = last_command("scale", "PORT=6000", "ENGINES=3")
    assert words == [CLI, "scale", "--port", "6000", "--engines", "3"]


def test_gateway() -> None:
    words = last_command("gateway", "ENGINE_ADDRESSES=a:1,b:2", "HTTP_PORT=80", HOST="my-laptop")
    assert words == [
        *(".venv/bin/python", "-m", "deploy.gateway", "--gateway-policy", "cache_aware"),
        *("--engine-addresses", "a:1,b:2", "--http-port", "80"),
    ]


def test_tests_use_all_processors_unless_they_are_named(pytestconfig: pytest.Config) -> None:
    words = last_command("test", "ARGS=tests/x.py -k y")
    assert words[1:] == ["-m", "pytest", *DISTRIBUTED, "tests/x.py", "-k", "y"]

    def workers(*args: str, keyword: str = "") -> int:
        config = SimpleNamespace(args=args, option=SimpleNamespace(keyword=keyword))
        found: int = pytestconfig.hook.pytest_xdist_auto_num_workers(config=config)
        return found

    folder = str(ROOT / "tests")
    assert workers(folder) == workers(folder, folder) == len(os.sched_getaffinity(0))
    for named in ([__file__], [f"{__file__}::test_x"], [folder, __file__]):
        assert workers(*named) == 0
    assert workers(folder, keyword="x") == 0


def test_images_are_built_with_what_there_is(tmp_path: Path) -> None:
    podman = tmp_path / "podman"
    podman.write_text('#!/bin/sh\necho podman "$@"\n')
    podman.chmod(0o755)
    programs = {name: shutil.which(name) for name in ("make", "sh", "test")}
    for name, path in programs.items():
        assert path
        (tmp_path / name).symlink_to(path)
    built = make("images", "BASE=debian", "PIP_ARGS=-i here", PATH=str(tmp_path)).splitlines()
    names = ("frontend", "gateway", "scheduler", "worker")
    assert built == [
        f"podman build --file docker/{name}.Dockerfile --build-arg BASE=debian "
        f"--build-arg PIP_ARGS=-i here --tag nano-vllm-grpc/{name}{':cpu' * (name == 'worker')} ."
        for name in names
    ]
    assert make("images", "BUILDER=echo").count("BASE=python:3.12-slim") == len(names)


def test_tests_run_without_xdist() -> None:
    """A GPU machine may bring its own pytest, without the plugin."""
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "--collect-only", "-q", __file__]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "test_tests_run_without_xdist" in listed


def test_help_lists_the_targets() -> None:
    targets = [line.split()[1] for line in make("help").splitlines()]
    expected = (
        "help setup up down restart scale gateway ps logs top chat generate doctor bench gpu-check "
        "images test simulate chaos abuse check protos lock"
    )
    assert targets == [*expected.split(), "clean"]
