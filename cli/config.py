"""Shows the settings of a stack, as a file for NANO_CONFIG_FILE."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Any

from cli.variables import NOT_OPTIONS
from deploy.plan import Environment, Layout, plan_stack, read_settings, stack_settings
from deploy.stack import run_directory
from shared.config import KNOWN_NAMES, PREFIX

_UP = "up"  # the source of values that `up` chooses


def show_config(environment: Environment, layout: Layout) -> int:
    """Prints a line of TOML per setting, with the source of its value in a comment. If `up` chooses
    the value, or it differs from that of an earlier service, the whole line is a comment.

    Args:
        environment: of this process, with the command's options as NANO_<NAME>.

    Raises:
        LaunchError, SettingsError: the stack could not start; the message says why.
    """
    port = read_settings(environment).port
    _, planned = plan_stack(environment, layout, run_directory(port), port)
    file = environment.get(f"{PREFIX}CONFIG_FILE", "")
    in_file = tomllib.loads(Path(file).read_text(encoding="utf-8")) if file else {}

    def source(name: str) -> str:
        variable = PREFIX + name.upper()
        if variable in environment:
            given = environment[variable] != os.environ.get(variable)
            return f"--{name.replace('_', '-')}" if given else variable
        return file if name in in_file else _UP if variable in planned else "default"

    shown: dict[str, set[str]] = {}  # lines by name
    for service, settings in stack_settings(planned).items():
        print(f"# {service}")
        for name in sorted((type(settings).model_fields.keys() & KNOWN_NAMES) - set(NOT_OPTIONS)):
            value: Any = getattr(settings, name)
            value = ",".join(value) if isinstance(value, tuple) else value
            line = f"{name} = {json.dumps(value, ensure_ascii=False)}"
            if name not in shown:
                comment = "# " if source(name) == _UP else ""
                print(f"{comment}{line}  # {source(name)}")
            elif line not in shown[name]:
                print(f"# {line}")
            shown.setdefault(name, set()).add(line)
    return 0
