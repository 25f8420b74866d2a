"""The renderer of the recording: when its rows show, and that XML readers accept the file."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from tools.animated_svg import Frame, Run, render

SVG = "{http://www.w3.org/2000/svg}"


def row(text: str) -> tuple[Run, ...]:
    return (Run(text),)


def shown(svg: str) -> dict[str, list[tuple[float, str]]]:
    """For each text, when it becomes visible or hidden, in percent of a round; empty if never."""
    rules = dict(re.findall(r"@keyframes (k\d+)\{(.*?\})\}", svg))
    changes = {}
    for element in ElementTree.fromstring(svg).iter(f"{SVG}text"):
        name = re.search(r"k\d+", element.get("class", ""))
        steps = re.findall(r"([\d.]+)%\{visibility:(\w+)\}", rules[name[0]]) if name else []
        changes["".join(element.itertext())] = [(float(at), value) for at, value in steps]
    return changes


def test_a_row_is_visible_until_a_frame_changes_it() -> None:
    frames = [
        Frame(0, (row("always"), row("first"))),
        Frame(2, (row("always"), row("second"))),
        Frame(5, (row("always"), row("third"))),
    ]
    assert shown(render(frames, [2], 10, 10)) == {
        "always": [],
        "first": [(0, "visible"), (20, "hidden")],
        "second": [(0, "hidden"), (20, "visible"), (50, "hidden")],
        "third": [(0, "hidden"), (50, "visible")],
    }


def test_without_animations_the_last_frame_shows() -> None:
    frames = [Frame(0, (row("first"),)), Frame(1, (row("last"),))]
    classes = {
        "".join(element.itertext()): element.get("class", "").split()
        for element in ElementTree.fromstring(render(frames, [1], 10, 2)).iter(f"{SVG}text")
    }
    assert "h" in classes["first"]
    assert "h" not in classes["last"]


def test_text_is_escaped_and_empty_rows_are_left_out() -> None:
    svg = render([Frame(0, (row("a <b> & c"), ()))], [1, 1], 10, 1)
    assert list(shown(svg)) == ["a <b> & c"]


def test_the_recording_in_the_docs_is_small_and_well_formed() -> None:
    path = Path(__file__).parents[2] / "docs" / "pictures" / "recording.svg"
    assert path.stat().st_size < 300_000
    assert any("kill -9" in text for text in shown(path.read_text(encoding="utf-8")))
