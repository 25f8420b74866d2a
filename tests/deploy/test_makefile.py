"""The commands that the Makefile's targets run."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.app import app

ROOT = Path(__file__).parents[2]
CLI = ".venv/bin/nano-vllm-grpc"


def run_make(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs make, isolated from any make that is running this test, but with its Python: with
    another, make would set up anew."""
    return subprocess.run(
        ["make", *arguments],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "PYTHON": sys.executable} | environment,
        capture_output=True,
        text=True,
        check=True,
    )


def make(*arguments: str, **environment: str) -> str:
    return run_make(*arguments, **environment).stdout


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
    words = last_command("generate", "IN=a b", "OUT=c", "PORT=6000", "ARGS=--concurrency 4")
    assert words[2:] == ["a b", "c", "--address", "127.0.0.1:6000", "--concurrency", "4"]
    words = last_command("bench", "MODE=stack", "TP=2", "ARGS=--num-seqs 4")
    assert (words[0], words[3:]) == ("NANO_TP=2", ["--mode", "stack", "--num-seqs", "4"])


def test_variables_must_be_given_to_make() -> None:
    """A shell may have any of them for something else."""
    shells = {"PORT": "6000", "HOST": "my-laptop", "MODEL": "gpt", "OUT": "/any"}
    done = run_make("--dry-run", "up", **shells)
    assert done.stderr.splitlines() == [
        f"make: {name} of the environment is ignored; make up {name}=... passes it"
        for name in ("MODEL", "PORT", "OUT")  # shells themselves export a HOST
    ]
    assert shlex.split(done.stdout.splitlines()[-1]) == [CLI, "up"]
    assert last_command("up", "HOST=::1", **shells)[2:] == ["--host", "::1"]
    for target in ("gpu-check", "bench", "chaos", "abuse"):
        assert "--out" not in last_command(target, OUT="/any")
        assert last_command(target, "OUT=a b", OUT="/any")[-2:] == ["--out", "a b"]


def test_unknown_variables_are_refused() -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        make("--dry-run", "up", "MAX_NUM_SEQ=64")
    assert "MAX_NUM_SEQ: unknown variable" in refused.value.stderr
    assert "MAX_NUM_SEQS" in refused.value.stderr
    # Words of values are no variables.
    assert last_command("test", "ARGS=-k a NAME=b ATTACKS=c")[-3:] == ["a", "NAME=b", "ATTACKS=c"]


TEXT = (ROOT / "Makefile").read_text().replace("\\\n", " ")
LISTS = re.findall(r"^(?:OF_ENGINE|SECURITY|STACK) :=(.*)$", TEXT, re.MULTILINE)
OF_UP = [f"{name}=1" for each in LISTS for name in each.split() if "(" not in name]


@pytest.mark.parametrize(
    ("target", "variables"),
    [
        ("up", OF_UP),
        ("down", ("PORT=6000", "RUNTIME=ray")),
        ("restart", ("PORT=6000", "SERVICE=worker", "ENGINE=1", "MODEL=m", "HANDOVER_TIMEOUT_S=2")),
        ("scale", ("PORT=6000", "ENGINES=3")),
        ("ps", ("PORT=6000",)),
        ("logs", ("SERVICE=worker",)),
        ("top", ("PORT=6000",)),
        ("profile", ("PORT=6000", "STEPS=5")),
        ("chat", ("PORT=6000", "HOST=::1")),
        ("generate", ("IN=a", "OUT=b")),
        ("doctor", ("TP=2", "RUNTIME=docker", "MODEL=m")),
    ],
)
def test_targets_pass_options_that_their_commands_have(
    target: str, variables: Sequence[str]
) -> None:
    _, command, *words = last_command(target, *variables)
    assert command == target
    options = [word for word in words if word.startswith("--")]
    assert len(options) >= len(variables) - 2
    everything = "--help-all" if command in ("up", "doctor") else "--help"
    shown = CliRunner().invoke(app, [command, everything], env={"COLUMNS": "200"}).stdout
    assert {*options} <= {*re.findall(r"--[a-z0-9-]+", shown)}


def test_every_test_is_run_by_one_of_two_targets() -> None:
    unit, system = (last_command(target)[1:] for target in ("test", "test-system"))
    assert unit[-2:] == ["-m", "not system and not soak"]
    assert system == [*unit[:-1], "system and not soak"]


def test_images_are_built_with_an_installed_builder(tmp_path: Path) -> None:
    podman = tmp_path / "podman"
    podman.write_text('#!/bin/sh\necho podman "$@"\n')
    podman.chmod(0o755)
    programs = {name: shutil.which(name) for name in ("make", "sh", "test")}
    for name, path in programs.items():
        assert path
        (tmp_path / name).symlink_to(path)
    built = make("images", "BASE=debian", "PIP_ARGS=-i here", PATH=str(tmp_path)).splitlines()
    names = ("frontend", "scheduler", "worker")
    assert built == [
        f"podman build --file docker/{name}.Dockerfile --build-arg BASE=debian "
        f"--build-arg PIP_ARGS=-i here --tag nano-vllm-grpc/{name}{':cpu' * (name == 'worker')} ."
        for name in names
    ]
    assert make("images", "BUILDER=echo").count("BASE=python:3.12-slim") == len(names)


def test_help_lists_the_targets() -> None:
    targets = {line.split()[1] for line in make("help").splitlines()}
    (phony,) = re.findall(r"^\.PHONY:(.*)$", TEXT, re.MULTILINE)
    assert targets == {each for each in phony.split() if not each.startswith("check-")}
