"""The page of models."""

from __future__ import annotations

from collections.abc import Iterator

from tools.reference import markdown
from tools.reference.markdown import code, table
from worker_svc.models.chat_formats import TOOL_CALLS
from worker_svc.models.families import FAMILIES


def page() -> str:
    return markdown.page(
        "Model families",
        "This page lists the model families that workers serve, and the formats in which the "
        "gateway reads their tool calls and reasoning.",
        "A worker finds the family by `architectures` in `config.json`, or by "
        "`general.architecture` in a GGUF file. It does not start with another architecture.",
        table(("Models", "`architectures`", "`general.architecture`"), _names()),
        "## Tool calls and reasoning",
        "The gateway reads answers with the parsers of the family. The names are those of Shepherd "
        "Model Gateway.",
        table(("`architectures`", "Tool calls", "Reasoning"), _parsers()),
        "A chat template that shows another format changes the parser of tool calls. The first of "
        "these texts that the template contains decides.",
        "\n".join(f"- {code(text)}: {code(parser)}" for text, parser in TOOL_CALLS.items()),
        "A template that ends with `<think>` changes the parser of reasoning to `deepseek_r1`, and "
        "one that contains `</think>` elsewhere changes it to `qwen3`.",
    )


def _names() -> Iterator[tuple[str, ...]]:
    for family in FAMILIES.values():
        yield family.models, code(family.architecture), code(family.gguf)


def _parsers() -> Iterator[tuple[str, ...]]:
    for family in FAMILIES.values():
        parsers = family.tool_call_parser, family.reasoning_parser
        yield code(family.architecture), *(code(each) if each else "not read" for each in parsers)
