"""The launcher's command line: a variable of `make up` is a flag, MAX_NUM_SEQS --max-num-seqs."""

from __future__ import annotations

import argparse

from pydantic.fields import FieldInfo

from deploy.plan import Layout
from deploy.stack import MODULES, SERVICES
from frontend.settings import FrontendSettings
from scheduler_svc.settings import SchedulerSettings
from shared.config import PREFIX
from worker_svc.settings import WorkerSettings

# Given on to the services as NANO_<NAME>. What is not given is not passed: their defaults apply.
_FIELDS: dict[str, FieldInfo] = {
    name: field
    for settings in (FrontendSettings, SchedulerSettings, WorkerSettings)
    for name, field in settings.model_fields.items()
    if name not in ("rank", "exit_with_parent")  # these are the launcher's to say
}


def parse_options(argv: list[str]) -> argparse.Namespace:
    """Reads the command line; `--help` and mistakes end the program."""
    parser = argparse.ArgumentParser(
        prog="python -m deploy", description="Starts and stops stacks: worker, scheduler, frontend."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    up = commands.add_parser("up", help="start a stack in the background, wait until it serves")
    run = commands.add_parser(
        "run",
        help="start a private stack, print READY HOST:PORT, stop when stdin ends or on a signal",
    )
    down = commands.add_parser("down", help="stop the stack")
    restart = commands.add_parser(
        "restart", help="restart processes one after another, each when the one before serves"
    )
    ps = commands.add_parser("ps", help="a line per process")
    logs = commands.add_parser("logs", help="show the logs and follow them")
    top = commands.add_parser("top", help="show the engine's load, live")
    for command in (up, run, down, restart, ps, logs, top):
        command.add_argument("--port", help="public port, which also names the stack")
    for command in (up, down, ps, logs):
        command.add_argument("--runtime", choices=("native", "docker"), default="native")
    for command in (up, run):
        _add_settings(command)
    for command in (restart, logs):
        command.add_argument(
            "--service", type=_service, choices=SERVICES, help="only the processes of this service"
        )
    return parser.parse_args(argv)


def given_settings(options: argparse.Namespace) -> dict[str, str]:
    """The settings given as flags, as environment variables of the services."""
    values = {name: getattr(options, name, None) for name in _FIELDS}
    return {PREFIX + name.upper(): value for name, value in values.items() if value is not None}


def given_layout(options: argparse.Namespace) -> Layout:
    """The variables that only the launcher reads."""
    return Layout(options.frontends, tuple(options.services.split()), options.ranks)


def _add_settings(command: argparse.ArgumentParser) -> None:
    for name, field in _FIELDS.items():
        if name != "port":  # all commands have it
            command.add_argument(f"--{name.replace('_', '-')}", help=field.description)
    command.add_argument(
        "--frontends", type=_positive, default=1, help="frontend processes sharing the port"
    )
    command.add_argument(
        "--services", default=" ".join(SERVICES), help="which services run on this host"
    )
    command.add_argument("--ranks", help="worker ranks that run on this host: 2, or 0-3")


def _service(name: str) -> str:
    """A service by its name, or by that of its package."""
    packages = {package: service for service, package in MODULES.items()}
    return packages.get(name, name)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not above 0")
    return number
