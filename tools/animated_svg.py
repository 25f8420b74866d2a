"""Turns terminal screens into one animated SVG, which uses only CSS and so plays in an <img>."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

_CHAR_WIDTH, _LINE_HEIGHT, _FONT_SIZE, _MARGIN = 7.8, 17, 13, 14
_BACKGROUND, _PANE, _TEXT = "#0d1117", "#161b22", "#c9d1d9"


class Run(NamedTuple):
    """Characters of one style. `colour` is CSS; an empty one means the terminal's default."""

    text: str
    colour: str = ""
    bold: bool = False


Row = tuple[Run, ...]


class Frame(NamedTuple):
    """All rows of all panes, from `at` (seconds) until the next frame."""

    at: float
    rows: tuple[Row, ...]


class _Span(NamedTuple):
    """A row that does not change from `start` to `end`."""

    row: int
    content: Row
    start: float
    end: float


def render(frames: Sequence[Frame], panes: Sequence[int], columns: int, duration: float) -> str:
    """Draws the frames in an endless loop of `duration` seconds.

    A row is drawn once for as long as it does not change. Viewers without animations show the last
    frame.

    Args:
        panes: the number of rows in each pane, a box around the next rows of a frame.
    """
    boxes, baselines, height = _lay_out(panes)
    width = round(columns * _CHAR_WIDTH + 2 * _MARGIN)
    styles: dict[tuple[float, float], str] = {}
    texts = []
    for span in _spans(frames, duration):
        whole_round = span.start == 0 and span.end == duration
        key = (span.start, span.end)
        name = "" if whole_round else styles.setdefault(key, f"k{len(styles)}")
        texts.append(_text(span, name, baselines[span.row], lasts=span.end == duration))
    rules = [_rule(name, start, end, duration) for (start, end), name in styles.items()]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}">',
            f"<style>text{{font:{_FONT_SIZE}px ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,"
            f"monospace;fill:{_TEXT};white-space:pre}}.b{{font-weight:bold}}.h{{visibility:hidden}}"
            f"[class*=k]{{animation-duration:{duration:.2f}s;animation-timing-function:step-end;"
            f"animation-iteration-count:infinite}}{''.join(rules)}</style>",
            f'<rect width="{width}" height="{height}" rx="8" fill="{_BACKGROUND}"/>',
            *(
                f'<rect x="6" y="{top}" width="{width - 12}" height="{box_height}" rx="6" '
                f'fill="{_PANE}"/>'
                for top, box_height in boxes
            ),
            *texts,
            "</svg>\n",
        ]
    )


def _lay_out(panes: Sequence[int]) -> tuple[list[tuple[int, int]], list[int], int]:
    """Computes each box's (top, height), each row's baseline, and the total height."""
    boxes, baselines, top = [], [], 6
    for rows in panes:
        height = rows * _LINE_HEIGHT + 10
        boxes.append((top, height))
        baselines += [top + 5 + _LINE_HEIGHT * row + _FONT_SIZE for row in range(rows)]
        top += height + 6
    return boxes, baselines, top


def _spans(frames: Sequence[Frame], duration: float) -> list[_Span]:
    spans = []
    for row in range(len(frames[0].rows)):
        content, start = frames[0].rows[row], 0.0
        for frame in frames[1:]:
            if frame.rows[row] != content:
                spans.append(_Span(row, content, start, frame.at))
                content, start = frame.rows[row], frame.at
        spans.append(_Span(row, content, start, duration))
    return [span for span in spans if any(run.text.strip() for run in span.content)]


def _text(span: _Span, name: str, baseline: int, *, lasts: bool) -> str:
    classes = " ".join(filter(None, (name, "" if lasts else "h")))
    attributes = f' class="{classes}"' if classes else ""
    runs = "".join(_run(run) for run in span.content)
    return f'<text x="{_MARGIN}" y="{baseline}"{attributes} xml:space="preserve">{runs}</text>'


def _run(run: Run) -> str:
    fill = f' style="fill:{run.colour}"' if run.colour else ""
    weight = ' class="b"' if run.bold else ""
    text = escape(run.text)
    return f"<tspan{weight}{fill}>{text}</tspan>" if fill or weight else text


def _rule(name: str, start: float, end: float, duration: float) -> str:
    """The keyframes that show an element from `start` to `end`."""
    steps = [(start, "visible"), (end, "hidden")]
    if start > 0:
        steps.insert(0, (0.0, "hidden"))
    frames = "".join(
        f"{100 * at / duration:.3f}%{{visibility:{value}}}" for at, value in steps if at < duration
    )
    return f".{name}{{animation-name:{name}}}@keyframes {name}{{{frames}}}"
