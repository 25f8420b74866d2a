from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from shared.config import (
    FrontendSettings,
    SchedulerSettings,
    SettingsError,
    WorkerSettings,
    load_settings,
    settings_or_exit,
)


def test_flag_over_environment_over_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "nano.toml"
    file.write_text("port = 1\nhost = 'localhost'\nscheduler_address = 'file'\ntp = 3\n")
    monkeypatch.setenv("NANO_CONFIG_FILE", str(file))
    monkeypatch.setenv("NANO_PORT", "2")
    monkeypatch.setenv("NANO_HOST", "127.0.0.2")
    settings = load_settings(FrontendSettings, ["--port", "3"])
    assert (settings.port, settings.host, settings.scheduler_address) == (3, "127.0.0.2", "file")


def test_where_ranks_meet_is_known_from_the_usual_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def where() -> tuple[str, int]:
        settings = load_settings(WorkerSettings, [])
        return settings.master_addr, settings.master_port

    assert where() == ("127.0.0.1", 50054)
    monkeypatch.setenv("MASTER_ADDR", "gpu-a")
    monkeypatch.setenv("MASTER_PORT", "1234")
    assert where() == ("gpu-a", 1234)
    monkeypatch.setenv("NANO_MASTER_ADDR", "gpu-b")
    assert where() == ("gpu-b", 1234)
    monkeypatch.setenv("MASTER_PORT", "ten")
    with pytest.raises(SettingsError, match=r"master_port: .*'ten'"):
        where()


def test_settings_are_frozen() -> None:
    settings = load_settings(FrontendSettings, [])
    with pytest.raises(ValidationError, match="frozen"):
        settings.port = 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--max-num-seqs", "0"], r"max_num_seqs: .*greater than 0.*'0'"),
        (["--rank", "3"], r"rank: 3 is not below tp, which is 1"),
        (["--tp", "2"], r"worker_addresses: 1 given, tp is 2"),
        (["--device", "tpu"], r"device: .*'cpu' or 'cuda'.*'tpu'"),
        (["--memory-utilization", "1.5"], r"memory_utilization: 1.5 is not in \(0, 1\]"),
        (["--max-num-seqs", "64", "--max-num-batched-tokens", "32"], r"max_num_seqs: 64 .*32"),
        (["--kv-blocks", "many"], r"kv_blocks: .*'many'"),
    ],
)
def test_impossible_values_are_named(args: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_settings(WorkerSettings, args)


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


def test_addresses_are_split_at_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANO_WORKER_ADDRESSES", "unix:a.sock,host:2")
    monkeypatch.setenv("NANO_TP", "2")
    assert load_settings(WorkerSettings, []).worker_addresses == ("unix:a.sock", "host:2")


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
