"""Shows what a stack's engines are doing, live in the terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from deploy.engines import ask_loads
from deploy.native.processes import is_running
from deploy.stack import Stack
from shared.pb.scheduler_pb2 import GetLoadResponse

_REFRESH_S = 0.5
# "waiting": or swapped. "hits": of prompt tokens in the prefix cache. "drafts": the share that is
# accepted.
_COLUMNS = (
    *("engine", "frontends", "running", "waiting", "tokens/s", "step", "blocks used", "hits"),
    "drafts",
)
_SILENT = "the scheduler does not answer; see make ps and make logs"

Loads = Sequence[GetLoadResponse | None]  # by engine; None: it does not answer


def top(directory: Path) -> int:
    """Refreshes until Ctrl-C, or until the terminal closes or the stack stops. If the output is not
    a terminal, shows the load once, and returns 1 if no scheduler answers.

    Raises:
        LaunchError: no stack was started in `directory`.
    """
    stack, console = Stack.load(directory), Console(highlight=False)
    if not console.is_terminal:
        loads = ask_loads(stack)
        console.print(_render(stack, loads))
        return 0 if any(loads) else 1
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while console.is_terminal:  # until it closes, which does not signal all processes
            stack = stack.reloaded()
            loads = ask_loads(stack)
            if not any(loads) and not is_running(directory):
                break
            live.update(_render(stack, loads), refresh=True)
            time.sleep(_REFRESH_S)
    if console.is_terminal:
        console.print(f"the stack on port {stack.port} has stopped")
    return 0


def _render(stack: Stack, loads: Loads) -> RenderableType:
    """Returns the screen: a line for each engine, and one for all of them."""
    stages = max((load.num_stages for load in loads if load), default=1)
    pipeline = f"  {stages} pipeline stages" if stages > 1 else ""
    title = Text.assemble(("nano-vllm-grpc", "bold"), f"  {stack.address}{pipeline}")
    table = Table(box=None, padding=(0, 1, 0, 0))
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    for engine, load in enumerate(loads):
        if load is not None:
            step = f"{load.step_time_s * 1e3:.1f} ms"
            table.add_row(f"{engine}", f"{load.frontends}", *_figures([load], step))
    if len(loads) > 1:
        table.add_row("all", "", *_figures([load for load in loads if load is not None], ""))
    silent = [engine for engine, load in enumerate(loads) if load is None]
    notes = [Text(f"engine {engine}: {_SILENT}", style="red") for engine in silent]
    return Group(title, Text(), table, *notes)


def _figures(loads: Sequence[GetLoadResponse], step: str) -> list[str]:
    prompt_tokens = sum(load.prompt_tokens for load in loads)
    cached = sum(load.cached_prompt_tokens for load in loads)
    drafted = sum(load.draft_tokens for load in loads)
    accepted = sum(load.accepted_tokens for load in loads)
    return [
        f"{sum(load.running for load in loads)}",
        f"{sum(load.waiting + load.swapped for load in loads)}",
        f"{sum(load.tokens_per_s for load in loads):.0f}",
        step,
        f"{sum(load.blocks_used for load in loads)} of {sum(load.blocks for load in loads)}",
        f"{cached / prompt_tokens if prompt_tokens else 0.0:.0%}",
        f"{accepted / drafted:.0%}" if drafted else "-",
    ]
