"""The README's line counts match the code."""

from pathlib import Path

import pytest

from tools.readme_lines import ROOT, is_close, main, replace_table, table


def test_the_readme_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().out


def test_stubs_the_client_and_empty_files_are_not_counted_twice(tmp_path: Path) -> None:
    folders = ("frontend/client", "scheduler_svc", "worker_svc", "shared/pb", "deploy", "cli")
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "__init__.py").touch()
        (tmp_path / folder / "one.py").write_text("1\n" * 3)
    (tmp_path / "frontend" / "two.py").write_text("2\n" * 5)
    (tmp_path / "shared" / "three.py").write_text("3\n" * 7)
    counts = {
        row.split("|")[1].strip(): row.split("|")[2:5] for row in table(tmp_path).split("\n")[2:-1]
    }
    assert counts["frontend"] == [" 1 ", " 5 ", " 5 "]
    assert counts["client library"] == [" 1 ", " 3 ", " 3 "]
    assert counts["shared by the three"] == [" 1 ", " 7 ", " 7 "]


def test_a_readme_without_the_markers_is_refused() -> None:
    assert "| worker |" in table(ROOT)
    with pytest.raises(ValueError, match="no <!-- lines"):
        replace_table("# a readme", "")


def test_a_tenth_is_close_enough() -> None:
    assert is_close("| worker | 66 | 8,118 |", "| worker | 70 | 8,900 |")
    assert not is_close("| worker | 66 | 8,118 |", "| worker | 66 | 9,118 |")
    assert not is_close("| worker | 66 |", "| worker | 66 | 8,118 |")
