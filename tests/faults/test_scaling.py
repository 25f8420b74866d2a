"""Engines of the real stack come, restart, change and go under load."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Awaitable
from pathlib import Path

import psutil
from safetensors.torch import load_file, save_file

from deploy.native.processes import find_supervisor, running_processes
from deploy.ports import free_port
from deploy.stack import run_directory
from tests.deploy.conftest import Launcher, launching
from tests.faults.steady_load import make_requests, steady_load, stream_all, stream_tokens
from tests.stack import DEMO_MODEL
from tests.waiting import wait_for

_STREAMS = 8


async def test_no_stream_notices_engines_that_come_restart_change_and_go(tmp_path: Path) -> None:
    port = free_port()
    with launching(tmp_path) as launcher:
        launcher.use_real_services()
        flags = "--frontends", 2, "--dtype", "float32"
        up = launcher("up", "--port", port, *flags, NANO_MODEL=str(DEMO_MODEL))
        assert up.returncode == 0, up.stderr

        async def change(*command: object, engines: str) -> str:
            done = await asyncio.to_thread(launcher, *command, "--port", port)
            assert done.returncode == 0, (command, done.stderr)
            for service in ("scheduler", "worker"):
                assert labels(tmp_path / ".run" / str(port) / "metrics", service) == list(engines)
            return done.stdout

        async with steady_load(f"127.0.0.1:{port}", _STREAMS):
            assert "2 engines serve" in await change("scale", "--engines", 2, engines="01")
            before = await asyncio.to_thread(launcher.pids, port)
            assert "restarted 6 processes" in await change("restart", engines="01")
            after = await asyncio.to_thread(launcher.pids, port)
            assert before.keys() == after.keys()
            assert not set(before.values()) & set(after.values())
        other = changed_model(tmp_path / "other")
        await assert_each_stream_has_one_model(
            f"127.0.0.1:{port}", change("restart", "--model", other, engines="01")
        )
        async with steady_load(f"127.0.0.1:{port}", _STREAMS):
            assert "1 engine serves" in await change("scale", "--engines", 1, engines="0")
        log = (tmp_path / ".run" / str(port) / "supervisor.log").read_text()
        assert '"exit_status": -9' not in log  # all ended on their own
        wait_for(lambda: launcher.serving(port) == 4, "all to serve")


async def test_no_stream_notices_that_the_supervisor_is_gone_and_replaced(tmp_path: Path) -> None:
    port = free_port()
    with launching(tmp_path) as launcher:
        launcher.use_real_services()
        launcher.succeed("up", "--port", port, NANO_MODEL=str(DEMO_MODEL))
        before = pids(launcher, port)

        def shown() -> str:
            return str(launcher("ps", "--port", port).stdout)

        async with steady_load(f"127.0.0.1:{port}", _STREAMS):
            supervisor = find_supervisor(tmp_path / run_directory(port))
            assert supervisor is not None
            os.kill(supervisor.pid, signal.SIGKILL)
            said = "GONE make up starts one"
            await asyncio.to_thread(wait_for, lambda: said in shown(), "ps to say so")
            await asyncio.to_thread(launcher.succeed, "up", "--port", port)
            assert before - pids(launcher, port) == {supervisor.pid}
            # The new supervisor restarts what the old one started.
            running = running_processes(tmp_path / run_directory(port))
            (pid,) = (each.pid for each in running if each.name == "scheduler-0")
            parent = psutil.Process(pid).parent()
            assert parent is not None
            parent.kill()
            await asyncio.to_thread(wait_for, lambda: launcher.serving(port) == 3, "a successor")


def labels(metrics: Path, service: str) -> list[str]:
    """The engines that Prometheus sees processes of a service of."""
    files = sorted(metrics.glob(f"{service}-*.json"))
    return [json.loads(file.read_text())[0]["labels"]["engine"] for file in files]


def pids(launcher: Launcher, port: int) -> set[int]:
    return {process.pid for process in launcher.members(port)}


def changed_model(folder: Path) -> Path:
    """Makes a model with the demo model's shape and other weights."""
    shutil.copytree(DEMO_MODEL, folder)
    for file in folder.glob("*.safetensors"):
        save_file({name: 1.05 * each for name, each in load_file(file).items()}, file)
    return folder


async def assert_each_stream_has_one_model(address: str, restart: Awaitable[object]) -> None:
    """Streams without a pause until the model has been changed: each stream ends with the model
    that it began with."""
    requests = make_requests(_STREAMS)
    before = await stream_all(address, requests)
    over = asyncio.Event()

    async def repeat(number: int) -> list[list[int]]:
        results = []
        while not over.is_set():
            results.append(await stream_tokens(address, requests[number]))
        return results

    async with asyncio.TaskGroup() as tasks:
        streams = [tasks.create_task(repeat(number)) for number in range(_STREAMS)]
        await restart
        over.set()
    after = await stream_all(address, requests)
    assert before != after
    for old, new, stream in zip(before, after, streams, strict=True):
        assert all(result in (old, new) for result in stream.result())
