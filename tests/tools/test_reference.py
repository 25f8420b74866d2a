"""The pages of docs/reference, which `python -m tools.reference` writes from the code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.house import ROOT
from tools.reference.__main__ import FOLDER, PAGES, main
from tools.reference.cli import command_line
from tools.reference.protos import contract
from worker_svc.settings import WorkerSettings


@pytest.mark.parametrize("name", PAGES)
def test_each_page_is_up_to_date(name: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == PAGES[name](), "python -m tools.reference"


def test_a_changed_default_makes_the_check_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--check"]) == 0
    monkeypatch.setattr(WorkerSettings.model_fields["tp"], "default", 7)
    assert main(["--check"]) == 1
    assert capsys.readouterr().out == (
        "docs/reference/settings.md: out of date: python -m tools.reference\n"
    )


def test_stale_and_missing_pages_are_written(tmp_path: Path) -> None:
    folder = tmp_path / "reference"
    assert main(["--check"], folder) == 1
    assert not folder.exists()
    assert main([], folder) == 0
    (folder / "models.md").write_text("old")
    assert main(["--check"], folder) == 1
    assert main([], folder) == 0
    assert main(["--check"], folder) == 0


def test_pages_do_not_depend_on_the_machine(tmp_path: Path) -> None:
    """With one core, in another directory, with another environment."""
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "PYTHONHASHSEED": "1",
        "HOME": str(tmp_path),
        "COLUMNS": "40",
        "TERM": "dumb",
        "LC_ALL": "C",
        "NANO_MAX_NUM_SEQS": "3",
        "NANO_PORT": "7",
        "PORT": "8",
    }
    one_core = f"import os; os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}})"
    run = "import sys; from tools.reference.__main__ import main; sys.exit(main(['--check']))"
    command = [sys.executable, "-c", f"{one_core}; {run}"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in PAGES:
        assert str(ROOT) not in (FOLDER / name).read_text(encoding="utf-8")


def test_every_setting_option_and_public_field_is_described() -> None:
    for name, command in command_line().items():
        for parameter in command.params:
            assert parameter.help, f"{name}: {parameter.name}"
    public = contract("frontend")
    for definition in (*public.services, *public.types):
        for part in definition.parts:
            assert part.comment, f"{definition.name}.{part.name}"
