"""Chooses the gateway's parsers of thoughts and tool calls, by a model's chat template."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

from shared.model_directory import read_text
from worker_svc.errors import ModelError
from worker_svc.models.families import read_model_file

# What templates contain, and smg's name for the format of tool calls that goes with it.
TOOL_CALLS = {
    "<｜tool▁calls▁begin｜>": "deepseek",
    "<tool_call>": "qwen",
    "<|python_tag|>": "llama",
    "<|im_start|>": "qwen",  # the custom of models that are trained with these marks
}
# What a template ends with that writes the beginning of a thought itself.
_OPENS_THOUGHT = re.compile(r"<think>(\\n|\s)*['\"]")


class Parsers(NamedTuple):
    """smg's names of parsers; None: not read."""

    reasoning: str | None
    tool_call: str | None


def choose_parsers(model_dir: Path) -> Parsers:
    """The parsers for a model's answers: those of its family, unless its chat template shows
    another format.

    Raises:
        ModelError: the model is of no family that is served, or a file cannot be read.
    """
    family, _ = read_model_file(model_dir)
    template = _template(model_dir)
    reasoning, tool_call = family.reasoning_parser, family.tool_call_parser
    if _OPENS_THOUGHT.search(template.rpartition("add_generation_prompt")[2]):
        reasoning = "deepseek_r1"
    elif "</think>" in template:
        reasoning = "qwen3"
    for mark, parser in TOOL_CALLS.items():
        if mark in template:
            tool_call = parser
            break
    return Parsers(reasoning, tool_call)


def _template(model_dir: Path) -> str:
    """All chat templates of a model directory, one after the other."""
    try:
        paths = [*model_dir.glob("*.jinja"), *model_dir.glob("additional_chat_templates/*.jinja")]
        texts = [read_text(path) for path in sorted(paths)]
        config = model_dir / "tokenizer_config.json"
        if config.exists():
            given = json.loads(read_text(config)).get("chat_template") or ""
            named = [{"template": given}] if isinstance(given, str) else given
            texts += [str(each["template"]) for each in named]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelError(f"model: cannot read its chat template: {error!r}") from error
    return "".join(texts)
