"""The command line as a whole: its help, its options, its exit statuses."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.app import app
from cli.variables import NOT_OPTIONS
from deploy.plan import Layout
from shared.config import PREFIX
from tests.client.fake_server import running_server
from tests.deploy.test_makefile import last_command
from worker_svc.settings import WorkerSettings

COMMANDS = "up serve run down restart ps logs top profile chat generate config doctor bench"
NEITHER_TOUCHES = """
import sys
sys.argv = ["nano-vllm-grpc", "--help"]
from cli.app import app
from cli.variables import NOT_OPTIONS
try:
    app()
finally:
    print("imported:", *sorted({"torch", "transformers"} & set(sys.modules)))
"""


def test_help_lists_the_commands_and_imports_nothing_large() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NEITHER_TOUCHES], capture_output=True, text=True, check=True
    )
    for command in COMMANDS.split():
        assert f"│ {command} " in done.stdout
    assert done.stdout.endswith("imported:\n")


def test_every_variable_of_make_up_is_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def up(environment: dict[str, str], layout: Layout) -> int:
        given.update({k: v for k, v in environment.items() if k.startswith(PREFIX)}, layout=layout)
        return 0

    monkeypatch.setattr("deploy.native.commands.up", up)
    monkeypatch.delenv("NANO_THREADS", raising=False)
    variables = {
        "MAX_NUM_SEQS": "4",
        "TLS_CERT": "a b",
        "SYNC": "1",
        "HOST": "::1",
        "HTTP_PORT": "0",
    }
    launchers = {"FRONTENDS": "2", "SERVICES": "worker frontend", "RANKS": "0-1", "ENGINES": "3"}
    _, *words = last_command("up", *(f"{k}={v}" for k, v in (variables | launchers).items()))
    assert CliRunner().invoke(app, words).exit_code == 0
    assert given.pop("layout") == Layout(2, ("worker", "frontend"), "0-1", engines=3)
    assert given == {PREFIX + name: value for name, value in variables.items()}


def test_help_shows_common_options_and_help_all_every_option_with_its_values() -> None:
    common, everything = (
        CliRunner().invoke(app, ["up", option], env={"COLUMNS": "200"}).stdout
        for option in ("--help", "--help-all")
    )
    for option in ("--help-all", "--tp,--tensor-parallel-size", "--max-num-seqs", "--engines"):
        assert f"{option} " in common
    for option in ("--hang-timeout-s", "--ranks"):
        assert option not in common
    assert "auto|none|int8|int4|fp8" in everything
    assert "(default: 256)" in everything
    for name in WorkerSettings.model_fields:
        shown = re.search(rf"--{name.replace('_', '-')}[ ,]", everything)
        assert bool(shown) == (name not in NOT_OPTIONS)


def test_settings_have_the_names_of_vllm_too(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, str] = {}
    monkeypatch.setattr(
        "deploy.native.commands.run", lambda environment, _: given.update(environment) or 0
    )
    words = ["run", "--tensor-parallel-size", "2", "--gpu-memory-utilization", "0.5"]
    assert CliRunner().invoke(app, [*words, "--enforce-eager", "True"]).exit_code == 0
    assert {given[f"NANO_{name}"] for name in ("TP", "MEMORY_UTILIZATION", "ENFORCE_EAGER")} == {
        *("2", "0.5", "True")
    }


def test_chat_talks_to_the_address() -> None:
    with running_server() as server:
        words = ["chat", "--address", server.address, "--max-tokens", "3"]
        done = CliRunner().invoke(app, words, input="abc\n")
    assert done.exit_code == 0
    assert f"fake at {server.address}" in done.stdout
    assert "bcd\n" in done.stdout


def test_the_version_is_the_packages() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.stdout.strip()) == (0, version("nano-vllm-grpc"))


def test_config_says_where_each_setting_comes_from_and_can_be_read_again(tmp_path: Path) -> None:
    file = tmp_path / "nano.toml"
    file.write_text("max_num_seqs = 8\nmax_waiting = 7\n")
    given = {"NANO_CONFIG_FILE": str(file), "NANO_MAX_WAITING": "9", "NANO_MODEL": "models/demo"}
    first = CliRunner().invoke(app, ["config", "--port", "50911", "--tp", "2"], env=given)
    assert first.exit_code == 0, first.stderr
    lines = first.stdout.splitlines()
    sockets = "unix:.run/50911/worker-0.sock,unix:.run/50911/worker-1.sock"
    for line in (
        f"max_num_seqs = 8  # {file}",
        "max_waiting = 9  # NANO_MAX_WAITING",
        "tp = 2  # --tp",
        "sync = false  # default",
        f'# worker_addresses = "{sockets}"  # up',
        "# drain_timeout_s = 0.0",  # of others than frontends
    ):
        assert line in lines
    file.write_text(first.stdout)
    again = CliRunner().invoke(app, ["config"], env={"NANO_CONFIG_FILE": str(file)})
    assert again.exit_code == 0, again.stderr
    ours = [line for line in lines if not line.startswith("#")]
    assert [line for line in again.stdout.splitlines() if line.endswith(f"# {file}")] == [
        f"{line.split('  # ')[0]}  # {file}" for line in ours
    ]


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ("ps --port many", 1, "ps: port: Input should be a valid integer"),
        ("restart --port 1", 1, "restart: no stack was started in .run/1"),
        ("down --all --port 1", 1, "down: --all: stops all stacks"),
        ("logs --service engine", 2, "'engine' is not one of worker, scheduler, frontend"),
        ("config --max-num-seqs 0", 1, "max_num_seqs"),
        ("bench --mode load --growth 1", 2, "--growth: must be over 1"),
        ("up --modle x", 2, "No such option: --modle"),
        ("up --frontends 0", 2, "--frontends"),
        ("up --runtime podman", 2, "--runtime"),
    ],
)
def test_mistakes_are_plain_messages(words: str, status: int, message: str) -> None:
    result = CliRunner().invoke(app, words.split(), env={"COLUMNS": "200"})
    assert result.exit_code == status
    assert message in result.stderr
    assert "Traceback" not in result.output
