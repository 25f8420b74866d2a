"""Debian's Chromium without a screen, driven over its DevTools protocol, on pipes: needs nothing
that Python lacks.

with opened("http://127.0.0.1:8080") as tab:
    tab.type("Hello")
    tab.press("Enter")
    tab.wait_for(".turn", "Hello")
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from tests.waiting import wait_for

CHROMIUM = shutil.which("chromium")
_ANSWER_S = 60.0
_FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",  # which root cannot have
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
_KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, "")}


class Tab:
    """A page in a browser. `complaints` are its errors and violations of its policy."""

    def __init__(self, reading: int, writing: int) -> None:
        self.complaints: list[str] = []
        self._reading, self._writing = reading, writing
        self._unread = b""
        self._calls = 0
        self._session = ""

    def open(self, url: str) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=url)

    def call(self, method: str, **parameters: object) -> Any:
        """The result of a command."""
        self._calls += 1
        message = {"id": self._calls, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _ANSWER_S
        while True:
            answer = self._read(deadline)
            if answer.get("id") == self._calls:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.complaints.append(json.dumps(answer["params"]))

    def _read(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._unread:
            if not select.select([self._reading], [], [], deadline - time.monotonic())[0]:
                raise TimeoutError("Chromium does not answer")
            part = os.read(self._reading, 1 << 16)
            assert part, "Chromium has ended"
            self._unread += part
        message, _, self._unread = self._unread.partition(b"\0")
        return dict(json.loads(message))

    def evaluate(self, expression: str) -> Any:
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def text(self, selector: str) -> str:
        """The visible text of the elements that the selector finds."""
        found = f"[...document.querySelectorAll({json.dumps(selector)})]"
        return str(self.evaluate(f"{found}.map(each => each.innerText).join('\\n')"))

    def wait_for(self, selector: str, text: str = "") -> str:
        """Returns the text of such elements once there is one, and they contain `text`."""
        exists = f"document.querySelector({json.dumps(selector)}) !== null"
        wait_for(lambda: self.evaluate(exists), selector)
        found = wait_for(
            lambda: [read] if text in (read := self.text(selector)) else None,
            f"{text!r} in {selector}",
        )
        return found[0]

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        code, text = _KEYS[key]
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def show(self, width: int, height: int, theme: str) -> None:
        """Sets the size of the window, in CSS pixels, and the user's preference."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        preference = {"name": "prefers-color-scheme", "value": theme}
        self.call("Emulation.setEmulatedMedia", features=[preference])


@contextmanager
def opened(url: str) -> Iterator[Tab]:
    """A tab of a browser that has never seen anything before."""
    assert CHROMIUM
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    # The browser's ends must be its descriptors 3 and 4, which may be in use here.
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in (theirs_in, theirs_out)]
    redirect = f'exec "$@" 3<&{high[0]} 4>&{high[1]} 2>/dev/null'
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}"]
        browser = subprocess.Popen(["bash", "-c", redirect, "bash", *command], pass_fds=high)
        for fd in (theirs_in, theirs_out, *high):
            os.close(fd)
        try:
            tab = Tab(ours_in, ours_out)
            tab.open(url)
            yield tab
        finally:
            with suppress(BrokenPipeError, AssertionError):
                tab.call("Browser.close")
            browser.kill()
            browser.wait()
            os.close(ours_in)
            os.close(ours_out)
