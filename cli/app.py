"""The commands of `nano-vllm-grpc`."""

from __future__ import annotations

import importlib
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from cli.errors import CommandError
from cli.variables import takes_variables
from deploy.engines import DRAIN_S
from deploy.errors import LaunchError
from deploy.native import commands
from deploy.native.profile import profile as record_profile
from deploy.native.restart import restart as restart_processes
from deploy.plan import Environment, Layout, read_settings
from deploy.stack import SERVICES, dialled_address
from deploy.top import top as show_load
from nano_vllm_grpc import SamplingParams
from nano_vllm_grpc.chat import hold_conversation
from shared.config import PREFIX, SettingsError


class Commands(TyperGroup):
    """Exits with the status that a command returns, and prints a user's error as one line."""

    def invoke(self, ctx: Any) -> None:
        try:
            status = super().invoke(ctx)
        except (CommandError, LaunchError, SettingsError) as error:
            print(f"{ctx.invoked_subcommand}: {error}", file=sys.stderr)
            status = 1
        raise typer.Exit(status)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        print(version("nano-vllm-grpc"))
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="show version")
    ] = False,
) -> None:
    """Serves language models as three gRPC services: frontend, scheduler and workers."""


def _service(name: str) -> str:
    if name not in SERVICES:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(SERVICES)}")
    return name


_COMMANDS = {
    "native": "deploy.native.commands",
    "docker": "deploy.compose",
    "ray": "deploy.ray.commands",
}

Port = Annotated[
    str | None,
    typer.Option(metavar="INT", help="public port, which names the stack (default: 50051)"),
]
Address = Annotated[
    str | None, typer.Option(help="HOST:PORT of a frontend (default: the stack on PORT)")
]
Runtime = Annotated[
    Literal["native", "docker", "ray"], typer.Option(help="runtime of the stack's processes")
]
Service = Annotated[
    str | None,
    typer.Option(
        parser=_service, metavar="|".join(SERVICES), help="only the processes of this service"
    ),
]


@app.command()
@takes_variables
def up(environment: Environment, layout: Layout, runtime: Runtime = "native") -> int:
    """Start a stack in the background, wait until it serves, show a first completion."""
    return _run_in(runtime, "up", environment, layout)


@app.command()
@takes_variables
def serve(
    environment: Environment,
    layout: Layout,
    served: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="like --model (default: the demo model)"),
    ] = None,
) -> int:
    """Start a stack, show its logs, stop it on Ctrl-C or when this process ends."""
    return commands.serve(environment | ({PREFIX + "MODEL": served} if served else {}), layout)


@app.command()
@takes_variables
def run(environment: Environment, layout: Layout) -> int:
    """Start a private stack, print READY HOST:PORT, stop it when stdin ends or on a signal."""
    return commands.run(environment, layout)


@app.command()
def down(
    port: Port = None,
    runtime: Runtime = "native",
    every: Annotated[bool, typer.Option("--all", help="all stacks of this directory")] = False,
) -> int:
    """Stop the stack."""
    if every:
        if port or runtime != "native":
            raise CommandError("--all: stops all stacks of RUNTIME=native; leave out other options")
        return commands.down_all()
    return _run_in(runtime, "down", _environment(port))


@app.command()
def scale(
    engines: Annotated[int, typer.Option(min=1, help="number of engines to have")],
    port: Port = None,
    runtime: Runtime = "native",
) -> int:
    """Start more engines, or stop some, while the stack serves."""
    return _run_in(runtime, "scale", _environment(port), engines)


@app.command()
def restart(
    port: Port = None,
    service: Service = None,
    engine: Annotated[int | None, typer.Option(min=0, help="only this engine")] = None,
    model: Annotated[str | None, typer.Option(help="new model of the stack")] = None,
    handover_timeout_s: Annotated[
        float, typer.Option(min=0, help="seconds for streams to end or move to another engine")
    ] = DRAIN_S,
) -> int:
    """Restart processes or engines one at a time; wait until each one serves."""
    return restart_processes(_directory(port), service, engine, model, handover_timeout_s)


@app.command()
def ps(
    port: Port = None,
    runtime: Runtime = "native",
    as_json: Annotated[bool, typer.Option("--json", help="print a list in JSON")] = False,
) -> int:
    """Show a line per process: name, index, pid, address, state."""
    return _run_in(runtime, "ps", _environment(port), as_json)


@app.command()
def logs(port: Port = None, runtime: Runtime = "native", service: Service = None) -> int:
    """Show the logs and follow them."""
    return _run_in(runtime, "logs", _environment(port), service)


@app.command()
def top(port: Port = None) -> int:
    """Show the load of the engines, live."""
    return show_load(_directory(port))


@app.command()
def profile(
    port: Port = None,
    steps: Annotated[int, typer.Option(help="steps to record, up to 1000")] = 50,
) -> int:
    """Record the workers' next steps with torch's profiler."""
    return record_profile(_directory(port), steps)


@app.command()
def chat(
    address: Address = None,
    port: Port = None,
    system: Annotated[str, typer.Option(help="system prompt")] = "",
    temperature: Annotated[float | None, typer.Option(help="sampling temperature")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="maximum length of each answer")] = None,
    seed: Annotated[int | None, typer.Option(help="seed of each answer")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="stop string; may be given more than once")
    ] = None,
) -> int:
    """Talk to the model in the terminal."""
    params = SamplingParams(
        temperature=temperature, max_tokens=max_tokens, seed=seed, stop=stop or ()
    )
    return hold_conversation(address or _address(port), params, system)


@app.command()
def generate(
    requests: Annotated[Path, typer.Argument(help="JSON lines, with a prompt or request each")],
    output: Annotated[Path, typer.Argument(help="file for completions, JSON lines; may exist")],
    address: Address = None,
    port: Port = None,
    concurrency: Annotated[int, typer.Option(min=1, help="maximum of open requests")] = 256,
    params: Annotated[
        str, typer.Option(metavar="JSON", help="defaults for parameters that a line leaves unset")
    ] = "{}",
    token_ids: Annotated[bool, typer.Option("--token-ids", help="write token ids, too")] = False,
) -> int:
    """Complete all prompts of a file. After an interruption, the same command resumes."""
    # Imported here, because other commands do not need it.
    from cli.generate.run import Options, generate_file

    options = Options(address or _address(port), concurrency, params, token_ids)
    return generate_file(requests, output, options)


@app.command()
@takes_variables
def config(environment: Environment, layout: Layout) -> int:
    """Show the settings that a stack with these variables would have, and their sources."""
    from cli.config import show_config

    return show_config(environment, layout)


@app.command()
@takes_variables
def doctor(environment: Environment, layout: Layout) -> int:
    """Find problems that keep a stack with these variables from starting; suggest remedies."""
    from cli.doctor.run import diagnose

    return diagnose(environment, layout)


@app.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def bench(context: typer.Context) -> int:
    """Run benchmarks. --help lists the modes; --mode MODE --help lists the options of a mode."""
    from bench.__main__ import main

    return main(context.args)


def _run_in(runtime: str, command: str, *arguments: Any) -> int:
    """Runs a command of a runtime. Those of Ray import Ray, which is optional."""
    try:
        module = importlib.import_module(_COMMANDS[runtime])
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise LaunchError("RUNTIME=ray needs Ray: make setup RUNTIME=ray installs it") from error
    status: int = getattr(module, command)(*arguments)
    return status


def _environment(port: str | None) -> Environment:
    return dict(os.environ) | ({PREFIX + "PORT": port} if port else {})


def _directory(port: str | None) -> Path:
    return commands.directory_of(_environment(port))


def _address(port: str | None) -> str:
    """The address of the stack on `port` of this host."""
    settings = read_settings(_environment(port))
    return dialled_address(settings.host, settings.port)
