"""RUNTIME=docker: the commands and variables for docker compose or podman-compose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deploy.compose import DOCKER, compose_variables, rank_services
from deploy.errors import LaunchError
from deploy.plan import HttpPort, Layout, StackSettings, published_http_port
from deploy.stack import make_directory, run_directory

from .conftest import Launcher

ROOT = DOCKER.parent


@pytest.mark.parametrize("ranks", [{"tp": 2}, {"pp": 2}])
def test_variables_given_to_compose(ranks: dict[str, Any]) -> None:
    model = str(ROOT / "models" / "demo")
    settings = StackSettings(model=model, port=6000, **ranks)
    assert compose_variables(settings, Layout(frontends=3)) == {
        "MODEL_DIRECTORY": model,
        "HOST": "127.0.0.1",
        "PORTS": "6000-6002",
        "FRONTENDS": "3",
        "NANO_SERVED_MODEL_NAME": "demo",
        "NANO_WORKER_ADDRESSES": "worker-0:50053,worker-1:50053",
    }


def test_each_rank_of_each_stage_has_a_container() -> None:
    services = rank_services(StackSettings(tp=2, pp=2).ranks_per_engine, 2, "cpu")
    assert [*services] == [*(f"worker-{index}" for index in range(1, 8)), "scheduler-1"]
    last: Any = services["worker-7"]
    addresses = ",".join(f"worker-{index}:50053" for index in range(4, 8))
    flags = ["--engine-name", "1", "--worker-addresses", addresses, "--rank", "3", "--index", "7"]
    assert last["command"] == [*flags, "--master-addr", "worker-4"]


@pytest.mark.parametrize(
    ("port", "wanted", "expected"),
    [(50051, "auto", 8000), (6000, "auto", 0), (50051, 0, 0), (6000, 8123, 8123)],
)
def test_where_http_is_published(port: int, wanted: HttpPort, expected: int) -> None:
    settings = StackSettings(port=port, http_port=wanted)
    assert published_http_port(settings) == expected
    ports = compose_variables(settings, Layout(frontends=2)).get("HTTP_PORTS")
    assert ports == (f"{expected}-{expected + 1}" if expected else None)


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
def test_commands_of_docker_and_podman(launcher: Launcher, port: int) -> None:
    # A process stands in for the container that answers the first request.
    launcher.succeed("up", "--port", port, "--services", "frontend")
    for program, command, wait in (
        ("docker", "compose ", " --wait"),
        ("podman-compose", "", ""),
    ):
        path = install_fake(launcher, program)
        up = launcher.succeed(
            *("up", "--runtime", "docker", "--port", port, "--tp", 2, "--max-num-seqs", 7),
            PATH=path,
            DOCKER_STATUS="0",
        )
        ranks = f".run/{port}/compose.ranks.json"
        assert (
            f"{command}--project-name nano-vllm-{port} --file {DOCKER}/compose.yaml "
            f"--file {ranks} --profile cpu up --build --detach{wait}\n"
        ) in up
        assert f"model={ROOT}/models/demo ports={port} seqs=7" in up
        assert "Once upon a time, there was a fox" in up

        down = "down", "--runtime", "docker", "--port", port
        assert "ended with status 3" in launcher.fail(*down, PATH=path, DOCKER_STATUS="3")


@pytest.mark.parametrize(
    ("program", "flags", "said"),
    [
        ("docker", ("--http-port", 8123), "/docker/http.yaml --file "),
        ("podman-compose", ("--frontends", 2), "FRONTENDS: must be 1 with podman"),
        ("neither", (), "or podman-compose"),
        ("docker", ("--max-requests-per-client", 2, "--speculation", "none"), "--profile cpu up "),
        ("docker", ("--otlp-endpoint", "http://c:1"), "OTLP_ENDPOINT: RUNTIME=docker has no such"),
        ("docker", ("--ranks", 0, "--ui-port", 8081), "RANKS, UI_PORT: RUNTIME=docker has no such"),
    ],
)
def test_http_is_a_file_and_impossible_options_are_rejected(
    launcher: Launcher, port: int, program: str, flags: tuple[object, ...], said: str
) -> None:
    path = install_fake(launcher, program)
    up = launcher(
        *("up", "--runtime", "docker", "--port", port, *flags), PATH=path, DOCKER_STATUS="3"
    )
    assert up.returncode == 1
    assert said in up.stdout + up.stderr


def test_a_compose_file_that_others_may_have_written_is_not_used(
    launcher: Launcher, port: int
) -> None:
    directory = launcher.directory / run_directory(port)
    make_directory(directory)
    ranks = directory / "compose.ranks.json"
    ranks.write_text("{}")
    ranks.chmod(0o666)
    directory.chmod(0o755)
    down = "down", "--runtime", "docker", "--port", port
    said = launcher.fail(*down, PATH=install_fake(launcher, "docker"), DOCKER_STATUS="0")
    assert "other users may write to compose.ranks.json; chmod go-w allows its use" in said
