"""Engines of the real stack come, go and change under load."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from deploy.ports import free_service_port
from tests.deploy.conftest import launching
from tests.faults.steady_load import make_requests, steady_load, stream_all, stream_tokens
from tests.stack import DEMO_MODEL

_STREAMS = 8


def labels(metrics: Path, service: str) -> list[str]:
    """The engines that Prometheus sees processes of a service of."""
    files = sorted(metrics.glob(f"{service}-*.json"))
    return [json.loads(file.read_text())[0]["labels"]["engine"] for file in files]


async def test_no_stream_notices_engines_that_come_restart_and_go(tmp_path: Path) -> None:
    port = free_service_port()
    with launching(tmp_path) as launcher:
        launcher.use_real_services()
        flags = "--engines", 2, "--frontends", 2, "--dtype", "float32"
        up = launcher("up", "--port", port, *flags)
        assert up.returncode == 0, up.stderr
        directory = tmp_path / ".run" / str(port)
        pids = []
        async with steady_load(f"127.0.0.1:{port}", _STREAMS):
            for command, engines, said in (
                (("scale", "--engines", 3), "012", "3 engines serve"),
                (("restart",), "012", "restarted 8 processes"),
                (("scale", "--engines", 1), "0", "1 engine serves"),
            ):
                done = await asyncio.to_thread(launcher, *command, "--port", port)
                assert done.returncode == 0, (command, done.stderr)
                assert said in done.stdout
                assert labels(directory / "metrics", "scheduler") == list(engines)
                assert labels(directory / "metrics", "worker") == list(engines)
                pids.append({process.pid for process in launcher.members(port)})
        scaled, restarted, _ = pids
        assert len(scaled & restarted) == 3  # supervisord, and the watchdog with its keeper
        log = (directory / "supervisord.log").read_text()
        assert "killing" not in log  # all ended on their own
        assert launcher("ps", "--port", port).stdout.count("RUNNING/SERVING") == 4


async def test_streams_end_with_the_model_that_they_began_with(tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(DEMO_MODEL, other)
    for file in other.glob("*.safetensors"):
        save_file({name: 1.05 * each for name, each in load_file(file).items()}, file)
    port = free_service_port()
    with launching(tmp_path) as launcher:
        launcher.use_real_services()
        flags = "--engines", 2, "--frontends", 2, "--dtype", "float32"
        up = launcher("up", "--port", port, *flags, NANO_MODEL=str(DEMO_MODEL))
        assert up.returncode == 0, up.stderr
        address, requests = f"127.0.0.1:{port}", make_requests(_STREAMS)
        before = await stream_all(address, requests)
        over = asyncio.Event()

        async def repeat(number: int) -> list[list[int]]:
            results = []
            while not over.is_set():
                results.append(await stream_tokens(address, requests[number]))
            return results

        async with asyncio.TaskGroup() as tasks:
            streams = [tasks.create_task(repeat(number)) for number in range(_STREAMS)]
            done = await asyncio.to_thread(launcher, "restart", "--port", port, "--model", other)
            over.set()
        assert done.returncode == 0, done.stderr
        after = await stream_all(address, requests)
        assert before != after
        for old, new, stream in zip(before, after, streams, strict=True):
            kinds = [
                ("old", "new", "neither")[[old, new, each].index(each)] for each in stream.result()
            ]
            assert "neither" not in kinds
