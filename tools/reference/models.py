"""The page of models."""

from __future__ import annotations

import html
from collections.abc import Iterator

from frontend.http.formats.tool_format import TEMPLATE_MARKS
from tools.reference import markdown
from tools.reference.markdown import code, table
from worker_svc.models.families import FAMILIES


def page() -> str:
    return markdown.page(
        "Model families",
        "This page lists the model families that workers serve, and the formats of tool calls and "
        "reasoning that are read over HTTP.",
        "A worker finds the family by `architectures` in `config.json`, or by "
        "`general.architecture` in a GGUF file. It does not start with another architecture.",
        "Tests compare each family with transformers, in small sizes with random weights. The last "
        "column names published weights that tests load.",
        table(
            ("Models", "`architectures`", "`general.architecture`", "Published weights"), _names()
        ),
        "## Tool calls and reasoning",
        "The chat template of a model determines the format of its tool calls. The first row whose "
        "text the template contains decides.",
        table(("Chat template contains", "Format of tool calls"), _formats()),
        "With another template, forced calls have the format of Hermes. Reasoning is text between "
        "`<think>` and `</think>` at the beginning of an answer, if the template contains one of "
        "these.",
    )


def _names() -> Iterator[tuple[str, ...]]:
    for family in FAMILIES.values():
        names = code(family.architecture), code(family.gguf) if family.gguf else "none"
        yield family.models, *names, family.tested or "none"


def _formats() -> Iterator[tuple[str, ...]]:
    for mark, form in TEMPLATE_MARKS.items():
        # Markdown's dialects differ in how a bar within code is written in a table.
        yield f"<code>{html.escape(mark).replace('|', '&#124;')}</code>", form.value
