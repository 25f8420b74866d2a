"""The page of models."""

from __future__ import annotations

from collections.abc import Iterator

from tools.reference import markdown
from tools.reference.markdown import code, table
from worker_svc.models.families import FAMILIES


def page() -> str:
    return markdown.page(
        "Model families",
        "This page lists the model families that workers serve.",
        "A worker finds the family by `architectures` in `config.json`, or by "
        "`general.architecture` in a GGUF file. It does not start with another architecture.",
        table(("Models", "`architectures`", "`general.architecture`"), _names()),
    )


def _names() -> Iterator[tuple[str, ...]]:
    for family in FAMILIES.values():
        yield family.models, code(family.architecture), code(family.gguf)
