"""The page of the command line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer

from cli.app import app
from cli.variables import metavar_of
from tools.house import ROOT
from tools.reference import markdown
from tools.reference.markdown import code, codes, described, prose

_PROGRAM = "nano-vllm-grpc"
_TARGET = re.compile(r"^([a-z-]+):.*?##\s*(.*)$", re.MULTILINE)


def command_line() -> dict[str, Any]:
    """The commands by name."""
    group: Any = typer.main.get_command(app)
    return dict(group.commands)


def stack_options() -> dict[str, Any]:
    """The options that `up` and other commands have for the settings of a stack, by name."""
    return {each.name: each for each in command_line()["config"].params}


def values(parameter: Any) -> str:
    """The values that an option or argument may have; empty for a flag."""
    if getattr(parameter, "is_flag", False):
        return ""
    words = parameter.metavar or metavar_of(parameter.type_descriptor.annotation)
    at_least = "" if parameter.min is None else f", at least {parameter.min}"
    return codes(words.split("|")) + at_least


def page() -> str:
    targets = _TARGET.findall((ROOT / "Makefile").read_text(encoding="utf-8"))
    return markdown.page(
        "Command line",
        f"This page lists the commands of `{_PROGRAM}`, their options, and the targets of `make` "
        "that call them.",
        f"In a checkout, `make` installs everything into `.venv`, and `.venv/bin/{_PROGRAM}` is "
        "the program. A command prints an error as one line, and exits with status 1. A wrong "
        "option gives status 2.",
        "## Targets of make",
        "Words in capitals are variables, such as in `make scale ENGINES=2`.",
        described(
            ("Target", "Purpose"), [(code(f"make {name}"), prose(help)) for name, help in targets]
        ),
        *_commands(),
    )


def _commands() -> Iterator[str]:
    shared = stack_options().keys()
    for name, command in command_line().items():
        is_for_stacks = shared <= {each.name for each in command.params}
        hidden = shared if is_for_stacks else ()
        parameters = [each for each in command.params if each.name not in hidden]
        arguments = [each for each in parameters if each.param_type_name == "argument"]
        options = [each for each in parameters if each.param_type_name == "option"]
        words = [_PROGRAM, name, "[OPTIONS]", *map(_argument, arguments)]
        yield f"## {name}"
        yield prose(command.help)
        yield f"```text\n{' '.join(words)}\n```"
        if is_for_stacks:
            others = ", and those below" * bool(options)
            yield f"Its options are the [settings of a stack](settings.md){others}."
        yield described(
            ("Argument", "Meaning"),
            [(code(_argument(each).strip("[]")), _help(each)) for each in arguments],
        )
        yield described(
            ("Option", "Value", "Meaning"),
            [(codes(each.opts), values(each) or "none", _help(each)) for each in options],
        )


def _argument(parameter: Any) -> str:
    name = str(parameter.metavar or parameter.name.upper())
    return name if parameter.required else f"[{name}]"


def _help(parameter: Any) -> str:
    """The help text, with the default unless it says nothing or is in the text."""
    text, default = parameter.help or "", parameter.default
    if parameter.required and parameter.param_type_name == "option":
        text += " (required)"
    elif default not in (None, False, "") and "(default" not in text:
        text += f" (default: {code(default)})"
    return prose(text)
