from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from deploy.dashboard.__main__ import DashboardSettings
from frontend.settings import FrontendSettings
from scheduler_svc.settings import SchedulerSettings
from shared.config import KNOWN_NAMES, SettingsError, load_settings, settings_or_exit
from worker_svc.settings import WorkerSettings


def test_flag_over_environment_over_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "nano.toml"
    file.write_text("port = 1\nhost = 'localhost'\nscheduler_address = 'unix:a'\ntp = 3\n")
    monkeypatch.setenv("NANO_CONFIG_FILE", str(file))
    monkeypatch.setenv("NANO_PORT", "2")
    monkeypatch.setenv("NANO_HOST", "127.0.0.2")
    settings = load_settings(FrontendSettings, ["--port", "3"])
    assert (settings.port, settings.host, settings.scheduler_address) == (
        3,
        "127.0.0.2",
        "unix:a",
    )


def test_settings_are_frozen() -> None:
    settings = load_settings(FrontendSettings, [])
    with pytest.raises(ValidationError, match="frozen"):
        settings.port = 1


def test_every_service_knows_the_names_of_all() -> None:
    engine = (FrontendSettings, SchedulerSettings, WorkerSettings)
    services = (*engine, DashboardSettings)
    assert {name for each in services for name in each.model_fields} == KNOWN_NAMES


def test_an_unknown_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANO_MAX_SEQS", "1")
    with pytest.raises(SettingsError, match="NANO_MAX_SEQS"):
        load_settings(FrontendSettings, [])


def test_a_variable_of_another_service_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANO_PORT", "1234")
    assert load_settings(SchedulerSettings, []).max_waiting > 0


@pytest.mark.parametrize(
    ("text", "message"), [("prot = 1", "prot"), ("port = ", "NANO_CONFIG_FILE"), (None, "No such")]
)
def test_a_bad_file_is_named(
    text: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "nano.toml"
    if text is not None:
        file.write_text(text)
    monkeypatch.setenv("NANO_CONFIG_FILE", str(file))
    with pytest.raises(SettingsError, match=message):
        load_settings(FrontendSettings, [])


@pytest.mark.parametrize("name", ["NANO_TOKEN", "NANO_CPU_FEATURES"])
def test_variables_of_others_are_no_unknown_settings(name: str) -> None:
    load_settings(FrontendSettings, [], {name: "any"})
    with pytest.raises(SettingsError, match=f"unknown in the environment: {name}S"):
        load_settings(FrontendSettings, [], {f"{name}S": "any"})


@pytest.mark.parametrize("args", [["--port", "70000"], ["--prot", "1"]])
def test_a_program_exits_with_2_and_says_why(
    args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        settings_or_exit(FrontendSettings, args)
    assert raised.value.code == 2
    error = capsys.readouterr().err
    assert "python -m frontend" in error
    assert args[0].removeprefix("--") in error
