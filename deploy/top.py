"""Shows what a stack's engine is doing, live in the terminal."""

from __future__ import annotations

import time
from pathlib import Path

import grpc
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from deploy.health import CHANNEL_OPTIONS
from deploy.stack import Stack
from deploy.supervisor import is_running
from shared.channels import open_blocking_channel
from shared.pb.scheduler_pb2 import GetLoadRequest, GetLoadResponse
from shared.pb.scheduler_pb2_grpc import SchedulerServiceStub

_REFRESH_S = 0.5
_TIMEOUT_S = 2.0
_BAR_WIDTH = 40


def top(directory: Path) -> int:
    """Refreshes until Ctrl-C, or until the terminal or the stack is gone. If the output is not a
    terminal, shows the load once and returns, with 1 if the scheduler does not answer.

    Raises:
        LaunchError: no stack was started in `directory`.
    """
    stack, console = Stack.load(directory), Console(highlight=False)
    tls = stack.tls("scheduler")
    with open_blocking_channel(stack.scheduler_address, tls, CHANNEL_OPTIONS) as channel:
        stub = SchedulerServiceStub(channel)
        if not console.is_terminal:
            load = _ask(stub)
            console.print(render(stack, load))
            return 0 if load else 1
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while console.is_terminal:  # until it hangs up, which does not signal everyone
                load = _ask(stub)
                if load is None and not is_running(directory):
                    break
                live.update(render(stack, load), refresh=True)
                time.sleep(_REFRESH_S)
    if console.is_terminal:
        console.print(f"no stack runs on port {stack.port} any more")
    return 0


def _ask(stub: SchedulerServiceStub) -> GetLoadResponse | None:
    try:
        return stub.GetLoad(GetLoadRequest(), timeout=_TIMEOUT_S)
    except grpc.RpcError:
        return None


def render(stack: Stack, load: GetLoadResponse | None) -> RenderableType:
    """Draws the screen for a scheduler's answer, or for None if there was none."""
    title = Text.assemble(("nano-vllm-grpc", "bold"), f"  {stack.address}")
    if load is None:
        return Group(title, Text("the scheduler does not answer: make ps, make logs", style="red"))
    rows = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    batch = load.step_sequences / load.steps if load.steps else 0
    rows.add_row("running", f"{load.running}", f"{load.frontends} frontends connected")
    rows.add_row("waiting", f"{load.waiting}", f"{load.waiting_tokens} tokens")
    rows.add_row("tokens/s", f"{load.tokens_per_s:.0f}", f"{load.sampled_tokens} since the start")
    steps = f"{load.steps} steps of {batch:.1f} sequences"
    rows.add_row("step", f"{load.step_time_s * 1e3:.1f} ms", steps)
    rows.add_row("preempted", f"{load.preemptions}", f"of {load.admissions} admissions")
    return Group(title, Text(), rows, Text(), _cache(load))


def _cache(load: GetLoadResponse) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, blocks in (
        ("blocks used", load.blocks_used),
        ("cached", load.blocks_cached),
        ("free", load.blocks_free),
    ):
        bar = ProgressBar(total=max(load.blocks, 1), completed=blocks, width=_BAR_WIDTH)
        table.add_row(name, f"{blocks} of {load.blocks}", bar)
    hits = load.cached_prompt_tokens / load.prompt_tokens if load.prompt_tokens else 0.0
    table.add_row(
        "prefix cache",
        f"{hits:.0%} hit",
        f"{load.cached_prompt_tokens} of {load.prompt_tokens} prompt tokens, "
        f"{load.evicted_blocks} blocks evicted",
    )
    return table
