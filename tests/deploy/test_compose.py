"""RUNTIME=docker: what the launcher asks docker compose, or podman-compose, to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.compose import DOCKER, compose_variables, http_port
from deploy.errors import LaunchError
from deploy.plan import HttpPort, Layout, StackSettings

from .conftest import Launcher

ROOT = DOCKER.parent


def test_variables_given_to_compose() -> None:
    model = str(ROOT / "models" / "demo")
    settings = StackSettings(model=model, tp=2, port=6000)
    assert compose_variables(settings, Layout(frontends=3)) == {
        "MODEL_DIRECTORY": model,
        "HOST": "127.0.0.1",
        "PORTS": "6000-6002",
        "FRONTENDS": "3",
        "HTTP_PORT": "0",
        "NANO_SERVED_MODEL_NAME": "demo",
        "NANO_WORKER_ADDRESSES": "worker-0:50053,worker-1:50053",
    }


@pytest.mark.parametrize(
    ("port", "wanted", "expected"),
    [(50051, "auto", 8000), (6000, "auto", 0), (50051, 0, 0), (6000, 8123, 8123)],
)
def test_where_http_is_published(port: int, wanted: HttpPort, expected: int) -> None:
    assert http_port(StackSettings(port=port, http_port=wanted)) == expected


def test_links_out_of_a_model_are_named(tmp_path: Path) -> None:
    """As from the hub's cache: containers would find them dangling."""
    model = tmp_path / "snapshots" / "0123"
    model.mkdir(parents=True)
    (tmp_path / "blob").write_text("{}")
    (model / "config.json").symlink_to("../../blob")
    with pytest.raises(LaunchError, match=r"MODEL: .*/config\.json is a link out of its .*cp -rL"):
        compose_variables(StackSettings(model=str(model)), Layout())


FAKE_DOCKER = """#!/bin/sh
echo "$@"
echo "model=$MODEL_DIRECTORY ports=$PORTS seqs=$NANO_MAX_NUM_SEQS"
exit $DOCKER_STATUS
"""


def install_fake(launcher: Launcher, program: str) -> str:
    """The path of a folder with nothing but a stand-in for `program`."""
    fake = launcher.directory / f"only-{program}" / program
    fake.parent.mkdir()
    fake.write_text(FAKE_DOCKER)
    fake.chmod(0o755)
    return str(fake.parent)


@pytest.mark.system
def test_what_docker_and_podman_are_asked_to_do(launcher: Launcher, port: int) -> None:
    # A process stands in for the container that answers the first request.
    assert launcher("up", "--port", port, "--services", "frontend").returncode == 0
    for program, command, wait in (
        ("docker", "compose ", " --wait"),
        ("podman-compose", "", ""),
    ):
        path = install_fake(launcher, program)
        up = launcher(
            *("up", "--runtime", "docker", "--port", port, "--tp", 2, "--max-num-seqs", 7),
            PATH=path,
            DOCKER_STATUS="0",
        )
        assert up.returncode == 0, up.stderr
        ranks = f".run/{port}/compose.ranks.json"
        assert (
            f"{command}--project-name nano-vllm-{port} --file {DOCKER}/compose.yaml "
            f"--file {ranks} --profile cpu up --build --detach{wait}\n"
        ) in up.stdout
        assert f"model={ROOT}/models/demo ports={port} seqs=7" in up.stdout
        assert "Once upon a time, there was a fox" in up.stdout

        down = launcher("down", "--runtime", "docker", "--port", port, PATH=path, DOCKER_STATUS="3")
        assert down.returncode == 1
        assert "ended with status 3" in down.stderr


def test_http_is_a_profile(launcher: Launcher, port: int) -> None:
    path = install_fake(launcher, "docker")
    up = launcher(
        *("up", "--runtime", "docker", "--port", port, "--http-port", 8123),
        PATH=path,
        DOCKER_STATUS="3",
    )
    assert up.returncode == 1
    assert "--profile cpu --profile http up " in up.stdout


def test_replicas_under_podman_are_refused(launcher: Launcher, port: int) -> None:
    path = install_fake(launcher, "podman-compose")
    up = launcher("up", "--runtime", "docker", "--port", port, "--frontends", 2, PATH=path)
    assert up.returncode == 1
    assert "FRONTENDS: must be 1 with podman" in up.stderr


def test_neither_docker_nor_podman(launcher: Launcher, port: int) -> None:
    up = launcher("up", "--runtime", "docker", "--port", port, PATH="/nowhere")
    assert up.returncode == 1
    assert "or podman-compose" in up.stderr
