"""The page as a process of a stack: its port, and what the launcher says and does about it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from deploy.errors import LaunchError
from deploy.health import SERVING, http_health
from deploy.plan import Layout, plan_stack
from deploy.ports import free_port
from deploy.stack import Process, Stack
from tests.deploy.conftest import Launcher, launching
from tests.stack import DEMO_MODEL
from tests.waiting import wait_for


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    with launching(tmp_path) as made:
        yield made


@pytest.mark.system
def test_the_page_from_up_to_down(launcher: Launcher) -> None:
    port, ui_port = free_port(), free_port()
    url = f"http://127.0.0.1:{ui_port}"
    up = launcher("up", "--port", port, "--ui-port", ui_port)
    assert up.returncode == 0, up.stderr
    assert f"Its dashboard is {url}." in up.stdout
    with urlopen(f"{url}/events") as events:
        state = next(line for line in events if line.startswith(b"data: "))
    assert json.loads(state.removeprefix(b"data: "))["faults"] == []

    row = launcher("ps", "--port", port).stdout.splitlines()[-1].split()
    assert [*row[:2], *row[3:]] == ["page", "0", url, "RUNNING/SERVING"]
    (page,) = [each for each in launcher.members(port) if each.pid == int(row[2])]
    page.kill()
    page.wait(30)
    wait_for(lambda: http_health(url) == SERVING, "another")

    # It shows engines that come.
    assert launcher("scale", "--port", port, "--engines", 2).returncode == 0
    with urlopen(f"{url}/events") as events:
        assert any(b'"scheduler-1"' in line for line in events)
    assert launcher("down", "--port", port).returncode == 0
    assert http_health(url) != SERVING


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The ports that others have."""
    ports: set[int] = set()
    monkeypatch.setattr("deploy.ports.is_free", lambda _, port: port not in ports)
    return ports


def plan(port: int = 50051, layout: Layout | None = None, **variables: str) -> Stack:
    environment = {f"NANO_{k}": v for k, v in variables.items()} | {"NANO_MODEL": str(DEMO_MODEL)}
    return plan_stack(environment, layout or Layout(), Path(".run/50051"), port)[0]


@pytest.mark.usefixtures("busy")
def test_the_usual_port_is_the_usual_stacks() -> None:
    public = {"HOST": "0.0.0.0", "ALLOW_PUBLIC_PLAINTEXT": "1"}
    assert list(plan(**public).processes())[-1] == Process("page", 0, "http://127.0.0.1:8080")
    assert plan(50061).ui_port not in (0, 8080)
    assert plan(50061, UI_PORT="8080").ui_port == 8080


def test_a_busy_port_is_only_a_mistake_if_it_was_asked_for(busy: set[int]) -> None:
    busy.add(8080)
    assert plan().ui_port not in (0, 8080)
    with pytest.raises(LaunchError, match="UI_PORT: 8080 is in use; use another port"):
        plan(UI_PORT="8080")


@pytest.mark.usefixtures("busy")
def test_the_stack_itself_may_have_the_port() -> None:
    assert plan(HTTP_PORT="8080").ui_port not in (0, 8080)
    for taken in ({"UI_PORT": "50051"}, {"UI_PORT": "7000", "HTTP_PORT": "7000"}):
        with pytest.raises(LaunchError, match=f"UI_PORT: {taken['UI_PORT']} is in use"):
            plan(**taken)


def test_no_page_where_there_is_nobody_to_ask() -> None:
    assert not plan(UI_PORT="0").count("page")
    for services in (("frontend",), ("scheduler", "page")):
        assert not plan(layout=Layout(services=services)).count("page")
