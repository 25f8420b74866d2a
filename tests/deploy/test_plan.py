"""From variables to a stack and the environment that its processes share."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from deploy.compose import compose_variables
from deploy.errors import LaunchError
from deploy.native import restart
from deploy.plan import Layout, plan_stack, read_settings
from deploy.stack import ENGINE_SERVICES, Process
from frontend.text.model_files import read_model_facts
from frontend.text.tokenizer import Tokenizer
from shared.config import SettingsError
from tests.certificates import Authority
from worker_svc.models.config import load_model_config
from worker_svc.weights.fingerprint import ModelFiles

from .conftest import DEMO, DIRECTORY, plan

ADDRESS = {"SCHEDULER_ADDRESS": "127.0.0.1:7"}
ADDRESSES = {"SCHEDULER_ADDRESSES": "127.0.0.1:7,127.0.0.1:8"}
RANKS = {"TP": "4", "WORKER_ADDRESSES": "a:1,b:2,c:3,d:4", "ALLOW_PLAINTEXT": "1"}
RANKS |= {"MASTER_PORT": "4321"}
STAGES = RANKS | {"TP": "2", "PP": "2", "PP_LAYERS": "1,3"}


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The ports that other programs have."""
    ports: set[int] = set()
    for module in ("ports", "plan"):
        monkeypatch.setattr(
            f"deploy.{module}.is_free", lambda _host, port, *_option: port not in ports
        )
    return ports


@pytest.mark.parametrize(("name", "usual"), [("HTTP_PORT", 8000), ("UI_PORT", 8080)])
def test_the_default_port_belongs_to_the_default_stack(
    busy: set[int], name: str, usual: int
) -> None:
    def port_of(port: int = 50051, **variables: str) -> int:
        stack, environment = plan(Layout(), port, **variables)
        url = stack.url if name == "HTTP_PORT" else list(stack.processes())[-1].address
        chosen = environment[f"NANO_{name}"]
        assert url == f"http://127.0.0.1:{chosen}"
        return int(chosen)

    assert port_of(HOST="0.0.0.0", ALLOW_PUBLIC_PLAINTEXT="1") == usual
    assert port_of(50061) not in (0, usual)
    assert port_of(50061, **{name: str(usual)}) == usual
    busy.add(usual)
    assert port_of() not in (0, usual)
    with pytest.raises(LaunchError, match=f"{name}: {usual} is in use; use another port"):
        plan(Layout(), **{name: str(usual)})


@pytest.mark.usefixtures("busy")
def test_http_is_served_by_frontends_and_the_dashboard_needs_one() -> None:
    stack, environment = plan(Layout(), HTTP_PORT="0", UI_PORT="0")
    assert not stack.http_port
    assert not stack.count("dashboard")
    assert environment["NANO_HTTP_PORT"] == "0"
    assert "NANO_RESPONSES_DIRECTORY" not in environment
    stack, environment = plan(Layout(services=("scheduler", "dashboard")), HTTP_PORT="8000")
    assert not stack.count("dashboard")
    assert environment["NANO_HTTP_PORT"] == "0"
    stack, _ = plan(Layout(services=("frontend",)), ALLOW_PLAINTEXT="1")
    assert stack.http_port == 8000
    assert not stack.count("dashboard")


@pytest.mark.usefixtures("busy")
def test_the_dashboard_gets_a_free_port() -> None:
    assert plan(Layout(), HTTP_PORT="8080")[0].ui_port not in (0, 8080)
    for taken in ({"UI_PORT": "50051"}, {"UI_PORT": "7000", "HTTP_PORT": "7000"}):
        with pytest.raises(LaunchError, match=f"UI_PORT: {taken['UI_PORT']} is in use"):
            plan(Layout(), **taken)


def test_http_has_the_tls_of_the_stack(authority: Authority) -> None:
    shown = authority.issue("http", "IP:127.0.0.1")
    tls = {"TLS_CERT": str(shown.cert), "TLS_KEY": str(shown.key)}
    for settings in (tls, tls | {"TLS_CLIENT_CA": str(authority.ca)}):
        stack, environment = plan(HTTP_PORT="auto", **settings)
        assert environment["NANO_HTTP_PORT"] == str(stack.http_port)
        assert stack.url == f"https://127.0.0.1:{stack.http_port}"


def test_background_responses_are_in_the_directory_of_the_stack_unless_told_otherwise() -> None:
    for given in ({}, {"RESPONSES_DIRECTORY": "/srv"}, {"RESPONSES_DIRECTORY": ""}):
        _, environment = plan(HTTP_PORT="auto", **given)
        expected = given.get("RESPONSES_DIRECTORY", f"{DIRECTORY}/responses")
        assert environment["NANO_RESPONSES_DIRECTORY"] == expected


def test_defaults() -> None:
    stack, environment = plan()
    assert list(stack.processes()) == [
        Process("worker", 0, "unix:.run/50051/worker-0.sock", engine=0),
        Process("scheduler", 0, "unix:.run/50051/scheduler.sock", engine=0),
        Process("frontend", 0, "127.0.0.1:50051"),
    ]
    # Unset variables are not passed on: the services' own defaults apply.
    assert environment == {
        "NANO_MODEL": DEMO,
        "NANO_SERVED_MODEL_NAME": "demo",
        "NANO_HOST": "127.0.0.1",
        "NANO_PORT": "50051",
        "NANO_SCHEDULER_ADDRESS": "unix:.run/50051/scheduler.sock",
        "NANO_SCHEDULER_ADDRESSES": "file:.run/50051/engines",
        "NANO_WORKER_ADDRESSES": "unix:.run/50051/worker-0.sock",
        "NANO_METRICS_DIRECTORY": ".run/50051/metrics",
        "NANO_HTTP_PORT": str(stack.http_port),
        "NANO_RESPONSES_DIRECTORY": ".run/50051/responses",
    }


FILE_OF_ENGINES = {"SCHEDULER_ADDRESSES": "file:.run/50051/engines"}


@pytest.mark.parametrize(
    ("layout", "variables", "expected"),
    [
        (Layout(metrics=False), {}, {"METRICS_DIRECTORY": None}),
        (Layout(), {"SERVED_MODEL_NAME": "acme/fox-1"}, {"SERVED_MODEL_NAME": "acme/fox-1"}),
        (Layout(services=("scheduler",)), {"MODEL": "/elsewhere"}, {"MODEL": "/elsewhere"}),
        (Layout(services=("frontend",)), ADDRESS, {**ADDRESS, "SCHEDULER_ADDRESSES": None}),
        (Layout(services=("frontend",)), ADDRESSES, ADDRESSES),
        (Layout(services=ENGINE_SERVICES), ADDRESS, ADDRESS | FILE_OF_ENGINES),
        (Layout(services=("worker", "scheduler")), {}, {"SCHEDULER_ADDRESSES": None}),
        (Layout(services=("worker",), ranks="2-3"), RANKS, RANKS),
        (Layout(services=("worker",), ranks="2-3"), STAGES, STAGES),
    ],
)
def test_shared_environment(
    layout: Layout, variables: dict[str, str], expected: dict[str, str | None]
) -> None:
    _, environment = plan(layout, **variables)
    assert {name: environment.get(f"NANO_{name}") for name in expected} == expected


def test_ranks_meet_at_a_port_that_no_other_stack_has(busy: set[int]) -> None:
    _, first = plan(TP="2")
    _, second = plan(TP="2")
    assert first["NANO_WORKER_ADDRESSES"].count("worker-") == 2
    assert plan(TP="2", PP="3")[1]["NANO_WORKER_ADDRESSES"].count("worker-") == 6
    assert plan(PP="2")[1]["NANO_MASTER_PORT"]
    assert first["NANO_MASTER_PORT"] != second["NANO_MASTER_PORT"]
    busy.add(23457)
    for port in ("23457", "50051"):
        with pytest.raises(LaunchError, match=rf"NANO_MASTER_PORT: {port} is in use on 127\.0"):
            plan(TP="2", MASTER_PORT=port)
    # As clusters set it.
    given = {"NANO_MODEL": DEMO, "MASTER_PORT": "4322"}
    given |= {f"NANO_{name}": value for name, value in RANKS.items() if name != "MASTER_PORT"}
    layout = Layout(services=("worker",), ranks="2-3")
    stack, environment = plan_stack(given, layout, DIRECTORY, 50051)
    assert environment["NANO_MASTER_PORT"] == "4322"
    assert list(stack.processes()) == [
        Process("worker", 2, "c:3", engine=0),
        Process("worker", 3, "d:4", engine=0),
    ]


@pytest.mark.parametrize(
    ("host", "passed", "dialled"),
    [
        ("0.0.0.0", "0.0.0.0", "127.0.0.1:50051"),
        ("::1", "[::1]", "[::1]:50051"),
        ("[::]", "[::]", "[::1]:50051"),
        ("localhost", "localhost", "localhost:50051"),
    ],
)
def test_hosts(host: str, passed: str, dialled: str) -> None:
    stack, environment = plan(HOST=host, ALLOW_PUBLIC_PLAINTEXT="1")
    assert environment["NANO_HOST"] == passed
    assert stack.address == dialled


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"MAX_NUM_SEQS": "many"}, "max_num_seqs"),
        ({"MAX_WAITING": "0"}, "max_waiting"),
        ({"DTYPE": "float8"}, "dtype"),
        ({"MEMORY_UTILIZATION": "1.5"}, "memory_utilization"),
        ({"TP": "0"}, "tp"),
        ({"TP": "2", "WORKER_ADDRESSES": "a:1"}, "worker_addresses"),
        ({"PORT": "70000"}, "port"),
        ({"MAX_SEQS": "3"}, "NANO_MAX_SEQS"),
        ({"HOST": "0.0.0.0"}, "host: 0.0.0.0:50051 would listen in plaintext: .*NANO_TLS_CERT"),
        ({"HOST": "::", "ALLOW_PLAINTEXT": "1"}, "host: .*NANO_ALLOW_PUBLIC_PLAINTEXT=1"),
        ({"SCHEDULER_ADDRESS": "a:1"}, "scheduler_address: .*NANO_INTERNAL_TLS_CERT"),
        (
            {"SCHEDULER_ADDRESS": "a:1", "ALLOW_PUBLIC_PLAINTEXT": "1"},
            r"scheduler_address: a:1 would .* \(NANO_ALLOW_PLAINTEXT=1\)",
        ),
        ({"SCHEDULER_ADDRESS": "unix-abstract:a"}, "scheduler_address: unix-abstract:a would"),
        ({"INTERNAL_TLS_ROLES": "required"}, "internal_tls_roles: needs internal_tls_cert"),
        ({"SERVED_MODEL_NAME": "two\nlines"}, "served_model_name"),
        ({"TLS_CERT": "cert.pem"}, "tls_cert, tls_key: set both or neither"),
        ({"TLS_CLIENT_CA": "ca.pem"}, "tls_client_ca: requires tls_cert"),
        ({"INTERNAL_TLS_CA": "ca.pem"}, "internal_tls_ca: give all three"),
    ],
)
def test_an_impossible_setting_is_named(variables: dict[str, str], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        plan(**variables)


@pytest.mark.parametrize(
    ("layout", "variables", "named"),
    [
        (Layout(services=("worker", "database")), {}, "SERVICES: database"),
        (Layout(ranks="1"), {}, "RANKS"),
        (Layout(ranks="0-x"), {}, "RANKS"),
        (Layout(ranks="4"), STAGES, "RANKS: '4' is not within 0-3, the ranks of TP=2 PP=2"),
        (Layout(services=("worker",), ranks="1"), {**RANKS, "MASTER_PORT": "0"}, "MASTER_PORT"),
        (Layout(), {"METRICS_ADDRESS": "0.0.0.0:9464"}, "NANO_METRICS_ADDRESS"),
        (Layout(engines=2), ADDRESS, "ENGINES: must be 1 with NANO_SCHEDULER_ADDRESS"),
        (
            Layout(engines=2),
            {"WORKER_ADDRESSES": "127.0.0.1:5"},
            "ENGINES: must be 1 with NANO_WORKER_ADDRESSES",
        ),
        (Layout(engines=2, services=("frontend",)), {}, "ENGINES: .* need worker and scheduler"),
        (
            Layout(engines=2, services=("scheduler", "frontend")),
            {},
            "ENGINES: .* need worker and scheduler",
        ),
        (
            Layout(engines=2, ranks="0"),
            {"TP": "2", "MASTER_PORT": "9"},
            "ENGINES: must be 1 with RANKS",
        ),
    ],
)
def test_an_impossible_layout_is_named(
    layout: Layout, variables: dict[str, str], named: str
) -> None:
    with pytest.raises(LaunchError, match=named):
        plan(layout, **variables)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("no/such/directory", "no/such/directory is not a directory$"),
        ("Qwen/Qwen3-0.6B", "not a directory; for the hub, use hub:Qwen/Qwen3-0.6B@REVISION"),
        ("hub:Qwen/Qwen3-0.6B", "no revision; use hub:Qwen/Qwen3-0.6B@REVISION. .* 40 hex"),
        ("hub:Qwen/Qwen3-0.6B@", "names no revision"),
        ("hub:Qwen/Qwen3-0.6B@../..", "names no revision"),
        ("hub:Qwen3-0.6B@main", "is not hub:OWNER/NAME@REVISION"),
        (".", "has no config.json"),
        (__file__, "is not a directory"),
    ],
)
def test_an_impossible_model_is_named(model: str, message: str) -> None:
    with pytest.raises(LaunchError, match=f"MODEL: .*{message}"):
        plan(MODEL=model)


def test_a_draft_model_is_found_as_a_model_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(DEMO).parent)
    for given, expected in (("demo", DEMO), ("ngram", "ngram"), ("none", "none")):
        assert plan(SPECULATION=given)[1]["NANO_SPECULATION"] == expected
    assert "NANO_SPECULATION" not in plan()[1]
    with pytest.raises(LaunchError, match=r"SPECULATION: no/such/directory is not a directory$"):
        plan(SPECULATION="no/such/directory")


def test_weights_in_two_files_are_refused_where_workers_start(tmp_path: Path) -> None:
    """A host of frontends may have the index without the files."""
    shutil.copy(Path(DEMO) / "config.json", tmp_path)
    for name in ("a.safetensors", "b.safetensors"):
        shutil.copy(Path(DEMO) / "model.safetensors", tmp_path / name)
    twice = f"{tmp_path}: .*: both a.safetensors and b.safetensors hold it"
    with pytest.raises(LaunchError, match=f"^MODEL: {twice}"):
        plan(MODEL=str(tmp_path))
    with pytest.raises(LaunchError, match=f"^SPECULATION: {twice}"):
        plan(SPECULATION=str(tmp_path))
    with pytest.raises(LaunchError, match=f"^MODEL: {twice}"):
        compose_variables(read_settings({"NANO_MODEL": str(tmp_path)}), Layout())
    with pytest.raises(LaunchError, match=f"^MODEL: {twice}"):
        restart._find_model(plan()[0], str(tmp_path))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "c.safetensors"}}))
    with pytest.raises(LaunchError, match=f"^MODEL: {tmp_path}: {index.name}: names c.safetensors"):
        plan(MODEL=str(tmp_path))
    plan(Layout(services=("frontend",)), MODEL=str(tmp_path), **ADDRESS)


COMMIT = "0123456789abcdef" * 2 + "01234567"


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A model in the hub's cache, laid out as that is: links to blobs outside the snapshot."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--somebody--demo"
    snapshot, blobs = repository / "snapshots" / COMMIT, repository / "blobs"
    for directory in (snapshot, blobs, repository / "refs"):
        directory.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for number, file in enumerate(Path(DEMO).glob("*.*")):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    return snapshot


def test_a_commit_pins_a_model_of_the_hub(cached: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stack, environment = plan(MODEL=f"hub:somebody/demo@{COMMIT}")
    assert environment["NANO_MODEL"] == str(cached)
    assert environment["NANO_SERVED_MODEL_NAME"] == stack.model == "somebody/demo"
    assert capsys.readouterr().err == ""
    # Links into the cache are followed by all readers.
    model = Path(environment["NANO_MODEL"])
    assert load_model_config(model).vocab_size == read_model_facts(model).vocab_size
    Tokenizer(model, threads=1).close()
    assert ModelFiles(model).fingerprint == ModelFiles(Path(DEMO)).fingerprint


def test_a_branch_of_the_hub_says_which_commit_it_was(
    cached: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, environment = plan(MODEL="hub:somebody/demo@main")
    assert environment["NANO_MODEL"] == str(cached)
    assert f"MODEL=hub:somebody/demo@{COMMIT} pins it" in capsys.readouterr().err
    with pytest.raises(LaunchError, match=r"MODEL: hub:nobody/nothing@main cannot be downloaded"):
        plan(MODEL="hub:nobody/nothing@main")
