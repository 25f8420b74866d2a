"""Shows how a stack is starting: a live table on a terminal, a line per change elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from deploy.health import SERVING
from deploy.logs import last_event
from deploy.native.startup import Report
from deploy.native.status import ProcessStatus
from deploy.stack import Stack


@contextmanager
def show_progress(stack: Stack) -> Iterator[Report]:
    """Yields a function to call with each new state of the processes."""
    console = Console(highlight=False)
    if not console.is_terminal:
        yield report_lines()
        return
    with Live(console=console, refresh_per_second=10) as live:
        spinners = {process.name: Spinner("dots") for process in stack.processes()}
        yield lambda statuses: live.update(_table(stack, statuses, spinners))


def report_lines() -> Report:
    """Returns a function that prints a line for each change of a process."""
    shown: dict[str, str] = {}

    def report(statuses: Sequence[ProcessStatus]) -> None:
        for status in statuses:
            name = status.process.name
            if shown.get(name) != status.summary:
                shown[name] = status.summary
                print(f"{name:12} {status.summary:20} {status.node}".rstrip(), flush=True)

    return report


def _table(stack: Stack, statuses: Sequence[ProcessStatus], spinners: dict[str, Spinner]) -> Table:
    table = Table.grid(padding=(0, 2))
    for status in statuses:
        name = status.process.name
        ready = status.health == SERVING
        table.add_row(
            Text("✓", style="green") if ready else spinners[name],
            name,
            "serving" if ready else "starting" if status.state == "RUNNING" else status.state,
            Text(last_event(stack.log(name)), style="dim", no_wrap=True, overflow="ellipsis"),
        )
    return table
