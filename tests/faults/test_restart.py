"""`make restart` of the real stack under load."""

from __future__ import annotations

import asyncio
from pathlib import Path

from deploy.ports import free_port
from tests.deploy.conftest import launching
from tests.faults.steady_load import steady_load

# Processes reload one after another, on busy cores.


async def test_a_rolling_restart_of_every_process_loses_no_token(tmp_path: Path) -> None:
    port = free_port()
    with launching(tmp_path) as launcher:
        launcher.use_real_services()
        up = launcher("up", "--port", port, "--frontends", 2, "--dtype", "float32")
        assert up.returncode == 0, up.stderr
        before = {process.pid for process in launcher.members(port)}

        async with steady_load(f"127.0.0.1:{port}"):
            restart = await asyncio.to_thread(launcher, "restart", "--port", port)
        assert restart.returncode == 0, restart.stderr
        assert "restarted 4 processes" in restart.stdout

        after = {process.pid for process in launcher.members(port)}
        assert len(before & after) == 3  # supervisord, and the watchdog with its keeper
        log = (tmp_path / ".run" / str(port) / "supervisord.log").read_text()
        assert "killing" not in log  # all ended on their own
        ps = launcher("ps", "--port", port)
        assert ps.stdout.count("RUNNING/SERVING") == 4
