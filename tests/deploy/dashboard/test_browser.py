"""The dashboard in a browser: an answer streams, goes on after its worker was killed, and stops."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator

import pytest

from deploy.ports import free_port
from tests.stack import DEMO_MODEL, RealStack, running_stack
from tests.waiting import wait_for

from .browser import CHROMIUM, Tab, opened

ANSWER = ".turn:not(.user)"
NEVER_SAID = 1534  # <|im_start|>

pytestmark = [
    pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed"),
    pytest.mark.system,
]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealStack]:
    """A stack whose model does not know how to end, and has the room to go on for minutes."""
    model = tmp_path_factory.mktemp("endless")
    shutil.copytree(DEMO_MODEL, model, dirs_exist_ok=True)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        config = json.loads((model / name).read_text())
        endless = {"eos_token_id": NEVER_SAID, "eos_token": None, "max_position_embeddings": 40960}
        (model / name).write_text(json.dumps(config | endless))
    with running_stack(model=model, ui_port=free_port(), pp=2) as running:
        yield running


@pytest.fixture
def tab(stack: RealStack) -> Iterator[Tab]:
    with opened(stack.stack.dashboard_url) as tab:
        tab.wait_for("#health.good", "serving")
        tab.wait_for("#prompt:focus")  # Chromium focuses it after the page has loaded
        yield tab
        assert not tab.complaints


def test_an_answer_streams_outlives_its_worker_and_stops(stack: RealStack, tab: Tab) -> None:
    tab.wait_for("#processes tr:nth-child(2)", "worker-0")
    tab.wait_for("#model", "2 pipeline stages")
    before = tab.text("#faults")
    tab.type("Tell me a story about a fox")  # the cursor is in place
    tab.press("Enter")
    begun = wait_for(lambda: tab.text(ANSWER).strip(), "the answer")
    wait_for(lambda: len(tab.text(ANSWER)) > len(begun), "more of it")
    assert stack.load().running == 1

    stack.kill("worker")
    tab.wait_for(f"{ANSWER} .notice", "worker-0 died")
    waited = tab.wait_for(f"{ANSWER} .notice", "the answer went on after")
    paused = tab.text(ANSWER)
    assert paused.replace("\n", "").startswith(begun.replace("\n", ""))
    wait_for(lambda: len(tab.text(ANSWER)) > len(paused), "the rest of it")
    wait_for(lambda: tab.text("#faults") != before, "the fault")
    # A dashboard that was late learns of the pause's beginning and end at once, and shows 0.00 s.
    pause, waited = tab.wait_for("#faults tr", "worker-0").split()[1], waited.split()[-2]
    assert float(pause) <= float(waited)
    # Once, unless a busy machine made it miss its heartbeats.
    assert int(tab.wait_for("#processes tr:nth-child(2):has(.good)").split()[-1]) >= 1
    tab.wait_for("#health.good", "serving")

    tab.press("Escape")
    tab.wait_for(f"{ANSWER} .facts", "stopped")
    stack.wait_idle()
    assert tab.evaluate("document.querySelector('[aria-busy]')") is None

    # It remembers what was said, and its button stops it, too.
    tab.type("And then?")
    tab.press("Enter")
    tab.wait_for(f"{ANSWER}[aria-busy]")
    for _ in range(2):  # from the text past New chat
        tab.press("Tab")
    assert tab.evaluate("document.activeElement.id") == "stop"
    tab.press("Enter")
    stack.wait_idle()
    assert tab.evaluate("document.activeElement.id") == "prompt"
    assert len(tab.text(".user").splitlines()) == 2


def test_charts_show_what_the_engine_does(stack: RealStack, tab: Tab) -> None:
    def value(number: int) -> str:
        return tab.text(f"figure:nth-child({number}) b")

    wait_for(lambda: value(1) == "0", "a sample")
    tab.type("Tell me a story about a fox")
    tab.press("Enter")
    wait_for(lambda: value(2) == "1\n0", "a sequence that runs")
    wait_for(lambda: value(1).isdecimal() and int(value(1)) > 0, "tokens")
    wait_for(lambda: value(4).endswith("s"), "the time of a step")
    wait_for(lambda: value(5).endswith("s"), "the time to the first token")
    wait_for(lambda: "." in value(6), "the accepted drafts")
    tab.press("Escape")
    wait_for(lambda: value(1) == "0", "no more tokens")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_all_of_it_fits_a_small_screen_in_either_theme(tab: Tab, theme: str) -> None:
    tab.show(360, 640, theme)
    tab.wait_for("#processes", "frontend-0")
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    # Charts are drawn anew once their places have other sizes.
    wait_for(lambda: tab.evaluate(overflow) == 0, "all within the screen's width")
    back, text = (
        tab.evaluate(f"getComputedStyle(document.body).{name}.match(/[0-9]+/g).map(Number)")
        for name in ("backgroundColor", "color")
    )
    assert (sum(back) > sum(text)) == (theme == "light")
