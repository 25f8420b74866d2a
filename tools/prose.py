"""`python -m tools.prose [FILE ...]`, a part of `make check`: checks the language of the documents.

It reports long sentences, words of `[tool.prose.words]` in pyproject.toml, table columns without a
name, paragraphs in table cells, pages that do not begin with a paragraph, and links to files that
do not exist. The reference pages are made from help texts, protos and docstrings, so these are
checked, too.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[1]
_PARSER = MarkdownIt("commonmark").enable("table")
SENTENCE_END = re.compile(r"""(?<=[.!?])['")]*\s+(?=["'(]?[A-Z0-9])""")
_HAS_LETTER = re.compile(r"\w")
_NAMES_OF_TESTS = "test"  # the column of such a name has no prose


def problems(text: str, prose: dict[str, Any]) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of each problem in a Markdown document.

    Args:
        text: the document.
        prose: `[tool.prose]`: the maximum of words in a sentence and in a table cell, and the
            words to avoid.
    """
    tokens = _PARSER.parse(text)
    blocks = [token.type for token in tokens if token.level == 0 and token.nesting == 1]
    if blocks[:2] != ["heading_open", "paragraph_open"]:
        yield 1, "a page begins with a title and a paragraph that says what the reader can do"
    columns: list[str] = []  # of the present table
    column = 0
    for before, token in zip([None, *tokens], tokens, strict=False):
        if token.type == "table_open":
            columns = []
        elif token.type == "tr_open":
            column = 0
        if before is None or token.type != "inline":
            continue
        line = (token.map or before.map or [0])[0] + 1
        words = _plain(token)
        for word, instead in prose["words"].items():
            if found := re.search(rf"(?i)(?<![\w`-])(?:{word})(?![\w-])", words):
                yield line, f'"{found[0]}": write {instead}'
        if before.type == "th_open":
            columns.append(words)
            if not words:
                yield line, "a column of a table without a name"
        elif before.type == "td_open":
            if columns[column] != _NAMES_OF_TESTS:
                yield from ((line, each) for each in _cell(words, prose["cell_words"]))
            column += 1
        else:
            for sentence in SENTENCE_END.split(words):
                if (count := _num_words(sentence)) > prose["sentence_words"]:
                    yield line, f"a sentence of {count} words: {sentence[:60]}…"
                if sentence.count(": ") + sentence.count("; ") > 1:
                    yield line, f"a chain of colons or semicolons: {sentence[:60]}…"


def _cell(words: str, limit: int) -> Iterator[str]:
    if (count := _num_words(words)) > limit:
        yield f"{count} words in a table cell: {words[:60]}…"
    if len(SENTENCE_END.split(words)) > 1:
        yield f"several sentences in a table cell: {words[:60]}…"


def _plain(inline: Token) -> str:
    """The text of a block, with code as one word and without its markup."""
    parts = []
    for each in inline.children or ():
        if each.type == "text":
            parts.append(each.content)
        elif each.type == "code_inline":
            parts.append("`x`")
        elif each.type in {"softbreak", "hardbreak"}:
            parts.append(" ")
    return "".join(parts).strip()


def _num_words(text: str) -> int:
    return sum(bool(_HAS_LETTER.search(word)) for word in text.split())


def missing_files(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the line of each link to a file that does not exist, and says so."""
    for token in _PARSER.parse(path.read_text(encoding="utf-8")):
        for each in token.children or ():
            target = str(each.attrs.get("href") or each.attrs.get("src") or "")
            file, _, _ = target.partition("#")
            if file and ":" not in file and not (path.parent / file).exists():
                yield (token.map or [0])[0] + 1, f"{file} does not exist"


def read_settings() -> dict[str, Any]:
    """The table `[tool.prose]`."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    settings: dict[str, Any] = tomllib.loads(text)["tool"]["prose"]
    return settings


def documents(root: Path) -> list[Path]:
    """The Markdown files of the project's top folder and of docs/."""
    return [*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md"))]


def main(args: Sequence[str]) -> int:
    prose = read_settings()
    paths = [Path(each) for each in args] or documents(ROOT)
    found = [
        f"{path}:{line}: {problem}"
        for path in paths
        for line, problem in chain(
            problems(path.read_text(encoding="utf-8"), prose), missing_files(path)
        )
    ]
    print("\n".join(found) or "the documents follow [tool.prose]")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
