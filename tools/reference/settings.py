"""The page of settings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from cli.variables import LAUNCHERS
from deploy.dashboard.__main__ import DashboardSettings
from deploy.plan import StackSettings
from frontend.settings import FrontendSettings
from scheduler_svc.settings import SchedulerSettings
from shared.config import CLIENT_NAMES, OTHER_NAMES, PREFIX, PYTORCH_NAMES, ServiceSettings
from tools.house import ROOT
from tools.reference import cli, markdown
from tools.reference.markdown import code, codes, described, number, prose
from worker_svc.settings import WorkerSettings

_READERS: Mapping[str, type[ServiceSettings]] = {
    "worker": WorkerSettings,
    "scheduler": SchedulerSettings,
    "frontend": FrontendSettings,
    "dashboard": DashboardSettings,
    "launcher": StackSettings,
}
# A setting is listed once, in the first section whose service reads it.
_SECTIONS: Mapping[str, type[ServiceSettings]] = {
    "Workers": WorkerSettings,
    "Scheduler": SchedulerSettings,
    "Frontends": FrontendSettings,
    "Launcher": StackSettings,
    "All services": ServiceSettings,
}
_INTRODUCTION = """Each setting has one name, which is written in four ways. For `max_num_seqs`:

- `make up MAX_NUM_SEQS=64` passes the variable as an option. `MAX_NUM_SEQS` in the environment is
  ignored.
- `nano-vllm-grpc up --max-num-seqs 64` passes the option to the services that read it.
- A variable of the environment, such as `NANO_MAX_NUM_SEQS=64`, reaches all services.
- `max_num_seqs = 64` in a TOML file, whose path is in `NANO_CONFIG_FILE`.

An option overrides the environment, the environment overrides the file, and the file overrides the
default. A service reads its own settings and ignores those of other services. It does not start if
a name is unknown or a value is invalid. The command `nano-vllm-grpc config` shows the values of a
stack and their sources.

The column "Ways" says how you can give a setting:

- `make`: all four ways.
- `up`: all but a variable of `make`.
- `service`: only to a service that you start yourself, such as `python -m scheduler_svc --index 1`.
  The launcher sets it or does not need it."""


def page() -> str:
    return markdown.page(
        "Settings",
        "This page lists every setting of a stack, with its values, its default, and the services "
        "that read it.",
        _INTRODUCTION,
        *_sections(),
        "## Size of a stack",
        "These are variables of `make up` and options of `nano-vllm-grpc up`. They have no "
        "variable in the environment.",
        described(("Variable", "Values", "Default", "Meaning"), _layout()),
        "## Clients",
        "The client library and the launcher read these variables of the environment.",
        described(("Variable", "Meaning"), _variables(CLIENT_NAMES)),
        "## Other variables",
        described(("Variable", "Meaning"), _variables(OTHER_NAMES)),
        f"Workers also read {codes(map(str.upper, PYTORCH_NAMES))}, which the launchers of PyTorch "
        f"set, unless the names with `{PREFIX}` are set.",
        "## Names of vLLM",
        "The command `up` also accepts these names.",
        described(("Option", "Setting"), _aliases()),
    )


def default_of(name: str) -> Any:
    """The default of a setting in the first service of an engine that a request reaches and that
    reads it."""
    services = (FrontendSettings, SchedulerSettings, WorkerSettings)
    return next(_default(cls, name) for cls in services if name in cls.model_fields)


def allowed(schema: Mapping[str, Any]) -> str:
    """The values that a JSON schema of pydantic allows."""
    if "anyOf" in schema:
        kinds = [each for each in schema["anyOf"] if each.get("type") != "null"]
        return " or ".join(map(allowed, kinds))
    if "enum" in schema:
        return codes(schema["enum"])
    if "const" in schema:
        return code(schema["const"])
    kind = schema.get("type")
    if kind == "boolean":
        return "`0`, `1`"
    if kind == "array":
        return "two integers `FIRST..LAST`" if "prefixItems" in schema else "list, with commas"
    return "text" if kind == "string" else _range(schema)


def _range(schema: Mapping[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        return f"{number(low)} to {number(high)}"
    names = {
        "minimum": "at least",
        "exclusiveMinimum": "above",
        "maximum": "at most",
        "exclusiveMaximum": "below",
    }
    limits = [f"{words} {number(schema[key])}" for key, words in names.items() if key in schema]
    return " ".join([schema["type"], " and ".join(limits)]).strip()


def _sections() -> Iterator[str]:
    variables, options = _make_variables(), cli.stack_options().keys()
    listed = set(CLIENT_NAMES)
    for title, cls in _SECTIONS.items():
        rows = []
        for name, field in cls.model_fields.items():
            if name in LAUNCHERS and cls is not StackSettings:
                continue
            if name in listed or (name in ServiceSettings.model_fields) != (cls is ServiceSettings):
                continue
            listed.add(name)
            readers = [each for each, other in _READERS.items() if name in other.model_fields]
            row = (
                code(name),
                allowed(_schema(cls)[name]),
                _defaults(cls, name),
                "all" if len(readers) == len(_READERS) else ", ".join(readers),
                "make" if name.upper() in variables else "up" if name in options else "service",
                prose(field.description or ""),
            )
            rows.append(row)
        yield f"## {title}"
        yield described(("Setting", "Values", "Default", "Read by", "Ways", "Meaning"), rows)


@cache
def _schema(cls: type[ServiceSettings]) -> dict[str, Any]:
    schema: dict[str, Any] = cls.model_json_schema()["properties"]
    return schema


def _default(cls: type[ServiceSettings], name: str) -> Any:
    return cls.model_fields[name].default


def _defaults(cls: type[ServiceSettings], name: str) -> str:
    """The default, and those of services in which it differs. The launcher chooses its own."""
    usual = _shown(_default(cls, name))
    others: dict[str, list[str]] = {}
    for reader, settings in _READERS.items():
        if name in settings.model_fields and settings is not StackSettings:
            value = _shown(_default(settings, name))
            if value != usual:
                others.setdefault(value, []).append(reader)
    return "; ".join([usual, *(f"{', '.join(who)}: {value}" for value, who in others.items())])


def _shown(value: Any) -> str:
    if value in ("", ()):
        return "empty"
    if value is None:
        return "none"
    if isinstance(value, bool):
        return code(int(value))
    return code(",".join(value) if isinstance(value, tuple) else value)


def _make_variables() -> set[str]:
    """The variables that `make up` passes on."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    lists = re.findall(r"^(?:OF_ENGINE|SECURITY|STACK) := (.*)$", text, re.MULTILINE)
    return {word for line in lists for word in line.split()}


def _layout() -> list[tuple[str, ...]]:
    names = {name for cls in _READERS.values() for name in cls.model_fields}
    runtime = next(each for each in cli.command_line()["up"].params if each.name == "runtime")
    options = [each for name, each in cli.stack_options().items() if name not in names]
    return [
        (code(each.name.upper()), cli.values(each), _shown(each.default), prose(each.help))
        for each in (*options, runtime)
        if each.param_type_name == "option" and not each.is_flag
    ]


def _variables(names: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(code(PREFIX + name.upper()), prose(text)) for name, text in names.items()]


def _aliases() -> list[tuple[str, str]]:
    return [
        (code(alias), code(name))
        for name, option in cli.stack_options().items()
        for alias in option.opts[1:]
    ]
