"""`python -m deploy up|run|down|restart|ps|logs|top`: the commands behind the Makefile."""

from __future__ import annotations

import gc

gc.disable()  # while importing, see `shared.process`

import argparse
import os
import sys

from deploy import commands, compose
from deploy.errors import LaunchError
from deploy.logs import follow
from deploy.options import given_layout, given_settings, parse_options
from deploy.plan import read_settings
from deploy.restart import restart
from deploy.stack import run_directory
from deploy.top import top
from shared.config import SettingsError


def main() -> int:
    """Returns the exit status: 0, 1 with the reason on stderr, 130 after Ctrl-C."""
    gc.freeze()
    gc.enable()
    options = parse_options(sys.argv[1:])
    try:
        return _dispatch(options)
    except (LaunchError, SettingsError) as error:
        print(f"{options.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _dispatch(options: argparse.Namespace) -> int:
    environment = dict(os.environ) | given_settings(options)
    if options.command == "run":
        return commands.run(environment, given_layout(options))
    directory = run_directory(read_settings(environment).port)
    if options.command == "top":
        return top(directory)
    if options.command == "restart":
        return restart(directory, options.service)
    if options.runtime == "docker":
        return _dispatch_docker(options, environment)
    if options.command == "up":
        return commands.up(environment, given_layout(options))
    if options.command == "down":
        return commands.down(directory)
    if options.command == "ps":
        return commands.ps(directory)
    follow(directory, options.service)


def _dispatch_docker(options: argparse.Namespace, environment: dict[str, str]) -> int:
    if options.command == "up":
        return compose.up(environment, given_layout(options))
    if options.command == "down":
        return compose.down(environment)
    if options.command == "ps":
        return compose.ps(environment)
    return compose.logs(environment, options.service)


if __name__ == "__main__":
    sys.exit(main())
