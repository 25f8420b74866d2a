"""The charts of the documents are drawn from the results in bench/results."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from tools import pictures


def test_each_chart_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {each.name for each in pictures.PICTURES.glob("*.svg")}
    monkeypatch.setattr(pictures, "PICTURES", tmp_path)
    pictures.main()
    drawn = sorted(tmp_path.iterdir())
    assert {each.name for each in drawn} <= names  # those that the documents show
    assert len(drawn) == 3
    for each in drawn:
        assert ElementTree.parse(each).getroot().tag == "{http://www.w3.org/2000/svg}svg"
