"""Images are built and run by hand, which takes minutes (docs/deploy/containers.md). Here, tests
check that all they copy and start exists, that the compose files fit the schema of the Compose
Specification, that their settings are known, and what containers may do.

compose-spec.json is that schema (github.com/compose-spec/compose-spec, Apache License 2.0) as
shipped in the PyPI package check-jsonschema 0.39.0.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from subprocess import PIPE
from threading import Thread
from typing import Any

import jsonschema
import pytest
import yaml

from deploy.compose import FILES, compose_variables, file_variables, rank_services
from deploy.plan import Layout, StackSettings
from frontend.settings import FrontendSettings
from nano_vllm_grpc.tls import ClientTls
from scheduler_svc.settings import SchedulerSettings
from shared.config import CLIENT_NAMES, ServiceSettings, load_settings
from tests.certificates import Authority
from worker_svc.settings import WorkerSettings

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
SCHEMA = json.loads((Path(__file__).parent / "compose-spec.json").read_text())
IMAGES = {
    "frontend": "frontend",
    "scheduler": "scheduler_svc",
    "worker": "worker_svc",
}
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
        if name == "COPY" and not arguments.startswith("--from")
        for source in arguments.split()[:-1]
    ]


def load(name: str) -> Any:
    return yaml.safe_load((DOCKER / name).read_text())


def services() -> dict[str, Any]:
    """The services of compose.yaml, with HTTP, and the kinds of worker that it extends."""
    composed = load("compose.yaml")["services"]
    for name, value in load("http.yaml")["services"]["frontend"].items():
        composed["frontend"][name] = _joined(composed["frontend"][name], value)
    return {name: composed[name] for name in SETTINGS if name in composed} | load("worker.yaml")[
        "services"
    ]


def _joined(first: Any, second: Any) -> Any:
    return first | second if isinstance(first, dict) else first + second


@pytest.mark.parametrize("image", IMAGES)
def test_copied_files_exist_and_reach_the_builder(image: str) -> None:
    patterns = (ROOT / ".dockerignore").read_text().split()
    kept = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    for source in copied(image):
        assert (ROOT / source).exists(), source
        assert source.split("/")[0] in kept, f".dockerignore hides {source}"
        assert not fnmatch(source, "**/__pycache__")


@pytest.mark.parametrize(("image", "package"), IMAGES.items())
def test_images_contain_what_their_service_imports(image: str, package: str) -> None:
    assert json.loads(dict(instructions(image))["ENTRYPOINT"]) == ["python", "-m", package]
    names = [name for name, _ in instructions(image)]
    assert dict(instructions(image))["USER"] == "10001"  # a number: Kubernetes knows it is not root
    assert names.index("USER") < names.index("ENTRYPOINT")
    program = "import runpy, sys, deploy.health\nrunpy.run_module(sys.argv[1])\nprint(*sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", program, package], cwd=ROOT, check=True, stdout=PIPE, text=True
    )
    for name in ran.stdout.split():
        if name.split(".")[0] in ("deploy", "frontend", "scheduler_svc", "shared", "worker_svc"):
            path = Path(*name.split("."))
            found = path / "__init__.py" if (ROOT / path).is_dir() else path.with_suffix(".py")
            assert any(found.is_relative_to(source) for source in copied(image)), found


@pytest.mark.parametrize("image", IMAGES)
def test_packages_are_installed_by_hash_but_for_torch(image: str) -> None:
    installs = [
        shlex.split(command)
        for name, arguments in instructions(image)
        if name == "RUN"
        for command in re.findall(r"pip install [^&|;]*", arguments)
    ]
    hashed = {words[-1].strip("/"): "--require-hashes" in words for words in installs}
    needs_torch = image in ("scheduler", "worker")
    names = {image, "torch"} if needs_torch else {image}
    assert hashed == {f"requirements/{name}.txt": name != "torch" for name in names}
    assert hashed.keys() <= set(copied(image))


def test_the_workers_image_compiles_the_cpu_kernels_and_keeps_no_compiler(tmp_path: Path) -> None:
    steps = instructions("worker")
    (compiles,) = (at for at, (_, words) in enumerate(steps) if "kernels.cpu.build --all" in words)
    final = max(at for at, (name, _) in enumerate(steps) if name == "FROM")
    assert any("install" in words and "g++" in words for _, words in steps[:compiles])
    assert not any("g++" in words for _, words in steps[final:])
    assert ("COPY", "--from=build /app /app") in steps[final:]
    # It needs nothing that is copied later.
    for name, words in steps[:compiles]:
        *sources, target = words.split()
        if name == "COPY" and target.startswith("worker_svc"):
            (tmp_path / target).mkdir(parents=True, exist_ok=True)
            for source in sources:
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, tmp_path / target, dirs_exist_ok=True)
                else:
                    shutil.copy(ROOT / source, tmp_path / target)
    command = [sys.executable, "-m", "worker_svc.kernels.cpu.build", "--help"]
    subprocess.run(command, cwd=tmp_path, check=True, stdout=PIPE)
    assert list(tmp_path.glob("worker_svc/kernels/cpu/native/*.cpp"))
    assert "worker_svc/kernels/cpu/native/build" in (ROOT / ".dockerignore").read_text().split()


@pytest.mark.parametrize("name", SETTINGS)
def test_containers_may_write_only_to_tmp_and_have_no_privileges(name: str) -> None:
    service = services()[name]
    assert service["read_only"] is True
    assert service["tmpfs"] == ["/tmp:size=${TMP_SIZE:-1g}"]
    assert service["pids_limit"] == 4096
    variable = "WORKER_MEMORY_LIMIT" if name in ("cpu", "gpu") else "MEMORY_LIMIT"
    assert service["mem_limit"] == f"${{{variable}:-0}}"
    assert service.get("shm_size") == ("${SHM_SIZE:-1g}" if name == "gpu" else None)
    assert not {"ipc", "network_mode", "pid"} & service.keys()
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not {"cap_add", "privileged", "user"} & service.keys()
    for volume in service["volumes"]:
        assert re.search(
            r":(/model:ro|/tmp/cache|/etc/nano/\w+:ro|/var/lib/nano/responses)$", volume
        )


def test_caches_are_in_the_volume_of_the_workers() -> None:
    variables = dict(
        pair.split("=")
        for name, arguments in instructions("worker")
        if name == "ENV"
        for pair in arguments.split()
    )
    assert "cache:/tmp/cache" in services()["cpu"]["volumes"]
    assert variables["XDG_CACHE_HOME"] == "/tmp/cache"
    assert variables["TRITON_CACHE_DIR"].startswith("/tmp/cache/")


def test_background_responses_are_in_a_volume_of_the_frontends_user() -> None:
    frontend = services()["frontend"]
    directory = frontend["environment"]["NANO_RESPONSES_DIRECTORY"]
    assert f"responses:{directory}" in frontend["volumes"]
    assert any(
        f"install --directory --owner nano --mode 700 {directory}" in arguments
        for _, arguments in instructions("frontend")
    )


@pytest.mark.parametrize("name", FILES)
def test_compose_files_fit_the_schema(name: str) -> None:
    jsonschema.validate(load(name), SCHEMA)


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_ranks_and_engines_are_services_whose_flags_are_known(kind: str) -> None:
    composed: Any = {"services": rank_services(2, 2, kind)}
    jsonschema.validate(composed, SCHEMA)
    services = composed["services"]
    assert list(services) == ["worker-1", "worker-2", "worker-3", "scheduler-1"]
    for service in services.values():
        extended = Path(service["extends"]["file"])
        assert extended.parent == DOCKER
        assert service["extends"]["service"] in load(extended.name)["services"]
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
    # The first rank has the same address with either profile.
    first = load("compose.yaml")["services"][f"worker-{kind}"]
    assert first["profiles"] == [kind]
    assert [f"{each}:50053" for each in first["networks"]["default"]["aliases"]] == [
        given["NANO_WORKER_ADDRESSES"]
    ]


def test_builds_find_their_files_and_arguments() -> None:
    built = {
        service["image"]: service["build"] for service in services().values() if "build" in service
    }
    assert built.keys() == {service["image"] for service in services().values()}
    for build in built.values():
        assert (DOCKER / build["context"] / build["dockerfile"]).is_file()
        image = Path(build["dockerfile"]).stem
        found = [arguments for name, arguments in instructions(image) if name == "ARG"]
        assert {*build["args"]} <= {each.partition("=")[0] for each in found}
        assert "BASE=python:3.12-slim" in found
        assert build["args"]["BASE"] == "${BASE:-python:3.12-slim}"


@pytest.mark.parametrize("name", SETTINGS)
def test_services_know_their_settings_and_are_probed_by_a_command_in_the_image(name: str) -> None:
    known = {f"NANO_{field.upper()}" for field in SETTINGS[name].model_fields}
    probe = {f"NANO_{each.upper()}" for each in CLIENT_NAMES}
    assert set(services()[name]["environment"]) <= known | probe
    passed = {
        variable
        for service in services().values()
        for variable, value in service["environment"].items()
        if value is None
    }
    assert passed & known <= set(services()[name]["environment"])
    kind, *command = services()[name]["healthcheck"]["test"]
    words = shlex.split(command[0]) if kind == "CMD-SHELL" else command
    assert words[:3] == ["python", "-m", "deploy.health"]


def test_only_what_clients_call_is_published_and_on_loopback() -> None:
    composed = load("compose.yaml")
    assert composed["networks"] == {"default": {"internal": True}, "published": {}}
    for name, service in (composed["services"] | services()).items():
        is_called = name == "frontend"
        assert ("ports" in service) == is_called
        assert ("published" in service.get("networks", ())) == is_called
        for ports in service.get("ports", ()):
            assert ports.startswith("${HOST:-127.0.0.1}:")


def filled_in(text: str, variables: Mapping[str, str]) -> str:
    """`text` of a compose file, with the values of its variables."""
    return re.sub(r"\$\{(\w+):-(.*?)\}", lambda found: variables.get(found[1]) or found[2], text)


def test_files_of_tokens_and_certificates_get_into_the_containers(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not file_variables(StackSettings())
    shown = authority.issue("docker", "DNS:stack.example")
    tokens = tmp_path / "tokens"
    tokens.write_text("a-token-of-sixteen\n")
    settings = StackSettings(auth_tokens_file=str(tokens), tls_cert=shown.cert, tls_key=shown.key)
    variables = file_variables(settings)
    service = services()["frontend"]
    volumes = [filled_in(volume, variables) for volume in service["volumes"]]
    mounts = dict(volume.split(":")[1::-1] for volume in volumes)
    environment = {
        variable: filled_in(str(value), variables)
        for variable, value in service["environment"].items()
        if value is not None
    }
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    read = load_settings(FrontendSettings, [])
    assert mounts[read.auth_tokens_file] == str(tokens)
    assert mounts[read.tls_cert] == shown.cert
    assert not read.tls_client_ca
    tls = ClientTls.from_environment(environment)
    assert tls
    assert tls.server_name == "stack.example"


@pytest.mark.parametrize(("status", "health"), [(200, "SERVING"), (503, "NOT_SERVING")])
def test_the_probe_asks_http_too(status: int, health: str) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.handle_request).start()
        url = f"http://127.0.0.1:{server.server_port}"
        probe = [sys.executable, "-m", "deploy.health", url]
        asked = subprocess.run(probe, stdout=PIPE, text=True, cwd=ROOT, check=False)
    assert asked.stdout.strip() == health
    assert asked.returncode == int(health != "SERVING")
