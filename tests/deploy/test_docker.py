"""Nothing builds the images here. Instead, tests check that all they copy and start exists, that
the compose files fit the schema of the Compose Specification, and that their settings are known.

compose-spec.json is that schema (github.com/compose-spec/compose-spec, Apache License 2.0) as
shipped in the PyPI package check-jsonschema 0.39.0.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from deploy.compose import compose_variables, rank_services
from deploy.errors import LaunchError
from deploy.plan import Layout, StackSettings
from frontend.settings import FrontendSettings
from scheduler_svc.settings import SchedulerSettings
from shared.config import ServiceSettings, load_settings
from worker_svc.settings import WorkerSettings

from .conftest import Launcher

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
SCHEMA = json.loads((Path(__file__).parent / "compose-spec.json").read_text())
IMAGES = {"frontend": "frontend", "scheduler": "scheduler_svc", "worker": "worker_svc"}
SETTINGS: dict[str, type[ServiceSettings]] = {
    "frontend": FrontendSettings,
    "scheduler": SchedulerSettings,
    "cpu": WorkerSettings,
    "gpu": WorkerSettings,
}


def instructions(image: str) -> list[tuple[str, str]]:
    """The instructions of an image's Dockerfile, as in (`COPY`, its arguments)."""
    text = (DOCKER / f"{image}.Dockerfile").read_text()
    lines = re.sub(r"^#.*\n", "", text, flags=re.M).replace("\\\n", " ").splitlines()
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines if line]


def copied(image: str) -> list[str]:
    return [
        source
        for name, arguments in instructions(image)
        if name == "COPY"
        for source in arguments.split()[:-1]
    ]


def load(name: str) -> Any:
    return yaml.safe_load((DOCKER / name).read_text())


def services() -> dict[str, Any]:
    """The services of compose.yaml, and the kinds of worker that it extends."""
    composed = load("compose.yaml")["services"]
    return {name: composed[name] for name in ("scheduler", "frontend")} | load("worker.yaml")[
        "services"
    ]


@pytest.mark.parametrize("image", IMAGES)
def test_what_is_copied_exists_and_reaches_the_builder(image: str) -> None:
    patterns = (ROOT / ".dockerignore").read_text().split()
    kept = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    for source in copied(image):
        assert (ROOT / source).exists(), source
        assert source.split("/")[0] in kept, f".dockerignore hides {source}"
        assert not fnmatch(source, "**/__pycache__")


@pytest.mark.parametrize(("image", "package"), IMAGES.items())
def test_what_is_started_exists_and_is_in_the_image(image: str, package: str) -> None:
    entrypoint = json.loads(dict(instructions(image))["ENTRYPOINT"])
    assert entrypoint == ["python", "-m", package]
    assert importlib.util.find_spec(f"{package}.__main__")
    assert {package, "shared", "deploy/__init__.py", "deploy/health.py"} <= set(copied(image))


@pytest.mark.parametrize("image", IMAGES)
def test_packages_are_installed_by_hash_but_for_torch(image: str) -> None:
    installs = [
        shlex.split(command)
        for name, arguments in instructions(image)
        if name == "RUN"
        for command in re.findall(r"pip install [^&|;]*", arguments)
    ]
    hashed = {words[-1]: "--require-hashes" in words for words in installs}
    assert hashed == {
        f"requirements/{name}.txt": name != "torch"
        for name in {
            "frontend": ("frontend",),
            "scheduler": ("scheduler", "torch", "triton"),
            "worker": ("worker", "torch"),
        }[image]
    }
    assert hashed.keys() <= set(copied(image))


@pytest.mark.parametrize("image", IMAGES)
def test_the_base_image_is_an_argument(image: str) -> None:
    first, second = instructions(image)[:2]
    assert first == ("ARG", "BASE=python:3.12-slim")
    assert second == ("FROM", "$BASE")
    for service in services().values():
        assert service["build"]["args"]["BASE"] == "${BASE:-python:3.12-slim}"


@pytest.mark.parametrize("image", IMAGES)
def test_images_do_not_run_as_root(image: str) -> None:
    names = [name for name, _ in instructions(image)]
    assert dict(instructions(image))["USER"] == "nano"
    assert names.index("USER") < names.index("ENTRYPOINT")


@pytest.mark.parametrize("name", ["compose.yaml", "worker.yaml"])
def test_compose_files_fit_the_schema(name: str) -> None:
    jsonschema.validate(load(name), SCHEMA)


def test_generated_ranks_fit_the_schema_and_extend_what_exists() -> None:
    ranks: Any = rank_services(3, 1, "gpu")
    jsonschema.validate(ranks, SCHEMA)
    assert list(ranks["services"]) == ["worker-1", "worker-2"]
    for service in ranks["services"].values():
        assert Path(service["extends"]["file"]) == DOCKER / "worker.yaml"
        assert service["extends"]["service"] in load("worker.yaml")["services"]
    assert ranks["services"]["worker-2"]["command"] == ["--rank", "2"]


def test_engines_are_services_whose_flags_are_known() -> None:
    composed: Any = rank_services(2, 2, "cpu")
    jsonschema.validate(composed, SCHEMA)
    services = composed["services"]
    assert list(services) == ["worker-1", "worker-2", "worker-3", "scheduler-1"]
    assert services["scheduler-1"]["extends"]["service"] in load("compose.yaml")["services"]
    environment = {"NANO_ALLOW_PLAINTEXT": "1", "NANO_TP": "2"}
    with pytest.MonkeyPatch.context() as patched:
        for name, value in environment.items():
            patched.setenv(name, value)
        worker = load_settings(WorkerSettings, services["worker-3"]["command"])
        scheduler = load_settings(SchedulerSettings, services["scheduler-1"]["command"])
    assert (worker.rank, worker.place, worker.master_addr) == (1, 3, "worker-2")
    assert worker.worker_addresses == scheduler.worker_addresses
    assert scheduler.worker_addresses == ("worker-2:50053", "worker-3:50053")
    assert worker.engine_name == scheduler.engine_name == "1"
    given = compose_variables(StackSettings(model=str(ROOT / "models" / "demo")), Layout(engines=2))
    assert scheduler.scheduler_address in given["NANO_SCHEDULER_ADDRESSES"].split(",")
    assert given["NANO_ENGINES_ON_HOST"] == "2"


def test_a_broken_compose_file_does_not_fit_the_schema() -> None:
    broken = load("compose.yaml")
    broken["services"]["frontend"]["port"] = 50051
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, SCHEMA)


def test_builds_find_their_files_and_arguments() -> None:
    for service in services().values():
        build = service["build"]
        dockerfile = (DOCKER / build["context"]).resolve() / build["dockerfile"]
        assert dockerfile.is_file()
        declared = {
            arguments.partition("=")[0]
            for name, arguments in instructions(dockerfile.name.removesuffix(".Dockerfile"))
            if name == "ARG"
        }
        assert set(build.get("args", {})) <= declared


def test_profiles_extend_the_kinds_of_worker() -> None:
    composed = load("compose.yaml")["services"]
    for kind in ("cpu", "gpu"):
        worker = composed[f"worker-{kind}"]
        assert worker["extends"] == {"file": "worker.yaml", "service": kind}
        assert worker["profiles"] == [kind]
        assert worker["networks"]["default"]["aliases"] == ["worker-0"]


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_passed_are_known_to_the_service(name: str) -> None:
    known = {f"NANO_{field.upper()}" for field in SETTINGS[name].model_fields}
    assert set(services()[name]["environment"]) <= known


@pytest.mark.parametrize("name", SETTINGS)
def test_health_is_probed_by_a_command_in_the_image(name: str) -> None:
    kind, *command = services()[name]["healthcheck"]["test"]
    words = shlex.split(command[0]) if kind == "CMD-SHELL" else command
    assert words[:3] == ["python", "-m", "deploy.health"]
    assert importlib.util.find_spec("deploy.health")


def test_only_frontends_are_published_and_on_loopback() -> None:
    for name, service in load("compose.yaml")["services"].items():
        assert ("ports" in service) == (name == "frontend")
    (ports,) = load("compose.yaml")["services"]["frontend"]["ports"]
    assert ports.startswith("${HOST:-127.0.0.1}:")


def test_variables_given_to_compose() -> None:
    model = str(ROOT / "models" / "demo")
    settings = StackSettings(model=model, tp=2, port=6000)
    assert compose_variables(settings, Layout(frontends=3)) == {
        "MODEL_DIRECTORY": model,
        "HOST": "127.0.0.1",
        "PORTS": "6000-6002",
        "FRONTENDS": "3",
        "NANO_SERVED_MODEL_NAME": "demo",
        "NANO_WORKER_ADDRESSES": "worker-0:50053,worker-1:50053",
    }


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


def test_what_docker_is_asked_to_do(launcher: Launcher, port: int) -> None:
    docker = launcher.directory / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text(FAKE_DOCKER)
    docker.chmod(0o755)
    path = f"{docker.parent}:{os.environ['PATH']}"

    # A process stands in for the container that answers the first request.
    assert launcher("up", "--port", port, "--services", "frontend").returncode == 0
    up = launcher(
        *("up", "--runtime", "docker", "--port", port, "--tp", 2, "--max-num-seqs", 7),
        PATH=path,
        DOCKER_STATUS="0",
    )
    assert up.returncode == 0, up.stderr
    ranks = f".run/{port}/compose.ranks.json"
    assert (
        f"compose --project-name nano-vllm-{port} --file {DOCKER}/compose.yaml --file {ranks} "
        "--profile cpu up --build --detach --wait\n"
    ) in up.stdout
    assert f"model={ROOT}/models/demo ports={port} seqs=7" in up.stdout
    assert "Once upon a time, there was a fox" in up.stdout

    down = launcher("down", "--runtime", "docker", "--port", port, PATH=path, DOCKER_STATUS="3")
    assert down.returncode == 1
    assert "ended with status 3" in down.stderr
