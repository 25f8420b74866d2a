"""Shows the settings of a stack, as a file for NANO_CONFIG_FILE."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Any

from cli.variables import NOT_OPTIONS
from deploy.plan import Environment, stack_settings
from shared.config import KNOWN_NAMES, PREFIX, ServiceSettings

# `up` chooses these where they are not given.
_CHOSEN = (
    *("engine_addresses", "scheduler_address", "scheduler_addresses", "worker_addresses"),
    *("http_port", "ui_port", "master_port", "profile_directory", "served_model_name"),
)


def show_config(environment: Environment) -> int:
    """Prints a line of TOML per setting, and in a comment where its value comes from. What another
    service has otherwise is a comment, too: a file has one value for all.

    Args:
        environment: this process's, with the options given to it as NANO_<NAME>.

    Raises:
        SettingsError: a service would refuse a value; the message names it.
    """
    services = stack_settings(environment)
    file = environment.get(f"{PREFIX}CONFIG_FILE", "")
    in_file = tomllib.loads(Path(file).read_text(encoding="utf-8")) if file else {}
    shown: dict[str, str] = {}
    for service, settings in services.items():
        print(f"# {service}")
        for name in sorted((type(settings).model_fields.keys() & KNOWN_NAMES) - set(NOT_OPTIONS)):
            source, value = _source(name, environment, file, in_file), _toml(settings, name)
            if source == "default" and name in _CHOSEN:
                value = ""
            if name not in shown:
                print(
                    f"{name} = {value}  # {source}" if value else f"# {name}: chosen at the start"
                )
            elif shown[name] != value:
                print(f"# {name} = {value}")
            shown.setdefault(name, value)
    return 0


def _source(name: str, environment: Environment, file: str, in_file: dict[str, Any]) -> str:
    variable = PREFIX + name.upper()
    if variable in environment:
        given = environment[variable] != os.environ.get(variable)
        return f"--{name.replace('_', '-')}" if given else variable
    return file if name in in_file else "default"


def _toml(settings: ServiceSettings, name: str) -> str:
    value = getattr(settings, name)
    return json.dumps(",".join(value) if isinstance(value, tuple) else value, ensure_ascii=False)
