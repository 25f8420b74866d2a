"""Finds problems that keep a stack from starting, and suggests remedies."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cli.doctor import host
from cli.doctor.host import Check
from deploy.errors import LaunchError
from deploy.model import HUB
from deploy.plan import Environment, Layout, plan_stack, read_settings
from deploy.stack import run_directory
from shared.config import PREFIX, SettingsError

_COLORS = {"ok": "green", "warning": "yellow", "wrong": "red"}


def diagnose(environment: Environment, layout: Layout) -> int:
    """Prints a line per check; returns 1 if a stack with these variables could not start."""
    console = Console(highlight=False)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("", "check", "found", "what to do"):
        table.add_column(column)
    with console.status("checking"):
        checks = list(_checks(environment, layout))
    for each in checks:
        color = _COLORS[each.state]
        table.add_row(
            f"[{color}]{each.state}[/]", each.name, escape(each.found), escape(each.remedy)
        )
    console.print(table)
    return 1 if any(each.state == "wrong" for each in checks) else 0


def _checks(environment: Environment, layout: Layout) -> Iterator[Check]:
    yield host.check_descriptors()
    yield host.check_disk()
    yield from host.check_stacks()
    try:
        settings = read_settings(environment)
        yield host.check_cores(layout.engines * settings.ranks_per_engine)
        if settings.ranks_per_engine > 1 and shutil.which("nvidia-smi"):
            yield host.check_shared_memory()
        if settings.device != "cpu" and shutil.which("nvidia-smi"):
            yield from host.check_kept_memory()
        if "frontend" in layout.services:
            yield host.check_port(settings.host, settings.port)
        if settings.model.startswith(HUB):
            remedy = "run make up, which downloads it, then use its directory as MODEL"
            yield Check("model", "warning", f"{settings.model}: not checked", remedy)
            return
        directory = run_directory(settings.port)
        if host.has_stack(directory):
            # The running stack has these ports.
            environment = environment | {f"{PREFIX}{name}_PORT": "0" for name in ("HTTP", "UI")}
        plan_stack(environment, layout, directory, settings.port)
    except (LaunchError, SettingsError) as error:
        yield Check("settings", "wrong", str(error), "docs/reference/settings.md")
        return
    yield Check("settings", "ok", "valid")
