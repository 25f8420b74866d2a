"""`make up`'s variables as options of a command: --max-num-seqs for MAX_NUM_SEQS."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from typer.core import TyperOption

from deploy.plan import Layout, StackSettings
from deploy.stack import SERVICES
from frontend.settings import FrontendSettings
from scheduler_svc.settings import SchedulerSettings
from shared.config import PREFIX, ServiceSettings
from worker_svc.settings import WorkerSettings

# In the order of `--help`; a setting of several services is shown with the first.
_PANELS: dict[str, type[ServiceSettings]] = {
    "Workers": WorkerSettings,
    "Scheduler": SchedulerSettings,
    "Frontends": FrontendSettings,
    "This host": StackSettings,
    "All services": ServiceSettings,
}
# The launcher sets these.
NOT_OPTIONS = (
    "engines_on_host",
    "exit_with_parent",
    "index",
    "metrics_address",
    "metrics_directory",
    "rank",
    "ranks_on_host",
)
# The launcher allows other values than the services.
LAUNCHERS = ("http_port",)

# What `--help` shows; `--help-all` shows all.
_COMMON = (
    *("model", "device", "dtype", "quantization", "kv_dtype", "speculation", "tp", "pp"),
    *("max_num_seqs", "max_num_batched_tokens", "max_model_len", "kv_blocks", "memory_utilization"),
    *("attention", "enforce_eager", "max_waiting", "host", "port", "served_model_name"),
    *("tls_cert", "tls_key", "auth_tokens_file", "http_port", "ui_port"),
)
# vLLM's names, which are accepted beside ours.
_VLLM_NAMES = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "memory_utilization": "gpu_memory_utilization",
}

_Host = partial(typer.Option, rich_help_panel="This host")


def _show_all(context: typer.Context, asked: bool) -> None:
    if asked:
        for parameter in context.command.params:
            if isinstance(parameter, TyperOption):
                parameter.hidden = False
        print(context.get_help())
        raise typer.Exit


def takes_variables(command: Callable[..., int]) -> Callable[..., int]:
    """Gives `command(environment, layout, ...)` an option for each variable. `environment` is
    this process's, with the given options as NANO_<NAME>; for others, the services' defaults apply.
    """
    settings = _settings()

    def call(
        frontends: Annotated[int, _Host(min=1, help="frontends, which share the port")] = 1,
        engines: Annotated[int, _Host(min=1, help="engines, each a scheduler and its workers")] = 1,
        services: Annotated[
            str, _Host(hidden=True, help="services to run on this host")
        ] = " ".join(SERVICES),
        ranks: Annotated[
            str | None, _Host(hidden=True, help="ranks to run on this host: 2, or 0-3")
        ] = None,
        metrics: Annotated[
            Literal["0", "1"], _Host(hidden=True, help="serve metrics to Prometheus")
        ] = "1",
        _: Annotated[
            bool,
            typer.Option(
                "--help-all", callback=_show_all, is_eager=True, help="show all options and exit"
            ),
        ] = False,
        **values: Any,
    ) -> int:
        environment = dict(os.environ)
        for name in settings:
            if (value := values.pop(name)) is not None:
                environment[PREFIX + name.upper()] = value
        layout = Layout(frontends, tuple(services.split()), ranks, metrics == "1", engines)
        return command(environment, layout, **values)

    own = list(signature(command, eval_str=True).parameters.values())[2:]
    launchers = list(signature(call, eval_str=True).parameters.values())[:-1]
    shown = [*own, *launchers, *settings.values()]
    call.__signature__ = Signature(shown)  # type: ignore[attr-defined]
    call.__annotations__ = {}  # typer reads those of the signature
    call.__name__, call.__doc__ = command.__name__, command.__doc__
    return call


def _settings() -> dict[str, Parameter]:
    """Returns the settings as parameters of a function. Their values stay strings, which the
    settings' classes check."""
    found: dict[str, Parameter] = {}
    for panel, settings in _PANELS.items():
        for name, field in settings.model_fields.items():
            common = name in ServiceSettings.model_fields
            if name in LAUNCHERS and settings is not StackSettings:
                continue
            if common == (settings is ServiceSettings) and name not in (*found, *NOT_OPTIONS):
                names = [name, *filter(None, [_VLLM_NAMES.get(name)])]
                option = typer.Option(
                    *(f"--{each.replace('_', '-')}" for each in names),
                    help=_help(field),
                    metavar=metavar_of(field.annotation),
                    rich_help_panel=panel,
                    hidden=name not in _COMMON,
                )
                found[name] = Parameter(
                    name,
                    Parameter.POSITIONAL_OR_KEYWORD,
                    default=None,
                    annotation=Annotated[str | None, option],
                )
    return found


def _help(field: FieldInfo) -> str:
    words = [field.description or ""]
    if isinstance(field.default, int | float | str) and field.default not in ("", "auto", False):
        words.append(f"(default: {field.default})")
    return " ".join(filter(None, words))


def metavar_of(annotation: Any) -> str:
    """The values that a setting may have: `auto|INT`."""
    if get_origin(annotation) is Literal:
        return "|".join(get_args(annotation))
    if annotation is bool:
        return "0|1"
    if isinstance(annotation, type):
        return "TEXT" if annotation is str else annotation.__name__.upper()
    if get_origin(annotation) in (Annotated, tuple):
        return metavar_of(get_args(annotation)[0])
    return "|".join(metavar_of(each) for each in get_args(annotation))
