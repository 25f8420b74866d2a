"""Promises 1 and 2: a worker, the scheduler, or the processes of grammars beside it are killed or
restarted, and streams continue without damage."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil
import pytest

from deploy.health import NOT_SERVING, check_health
from deploy.native.processes import parent_processes
from deploy.native.restart import restart
from tests.faults.streams import (
    LONG,
    REQUESTS,
    assert_undamaged,
    long_prompts,
    open_streams,
    undisturbed,
)
from tests.faults.transcript import Transcript
from tests.stack import DEMO_MODEL, RealStack, running_stack
from tests.waiting import wait_for

BLOCK_SIZE = 16
STEPS = 100  # without speculation, after which the longest streams are open
LONG_PROMPTS = long_prompts(count=3, length=1400, vocab_size=1536)
Killed = tuple[str, int]  # a service, and the index of its process


@dataclass(frozen=True)
class Victim:
    """A stack with steps so small that a prompt takes many, and its answers when undisturbed."""

    stack: RealStack
    model: Path
    expected: dict[str, Transcript]

    def rest(self) -> None:
        """Waits until everything serves again and nothing is left behind."""
        self.stack.wait_serving()
        self.stack.wait_idle()


@pytest.fixture(scope="module")
def victims(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Victim]]:
    """Victims by tensor parallelism; each starts when it is first asked for."""
    limits = {"max_num_batched_tokens": 32, "max_num_prefill_tokens": 16, "max_num_seqs": 32}
    # tests/e2e/test_speculation.py and campaigns have faults with speculation.
    variables = {"speculation": "none", "kv_blocks": 1024, "block_size": BLOCK_SIZE, **limits}
    with ExitStack() as stacks:

        @cache
        def victim_of(tp: int) -> Victim:
            model = tmp_path_factory.mktemp("models") / "copy"
            shutil.copytree(DEMO_MODEL, model)
            stack = stacks.enter_context(running_stack(model=model, tp=tp, **variables))
            return Victim(stack, model, undisturbed(stack.address, REQUESTS | LONG_PROMPTS))

        yield victim_of


@pytest.fixture
def victim(request: pytest.FixtureRequest, victims: Callable[[int], Victim]) -> Iterator[Victim]:
    """The victim with this tensor parallelism, at rest after each test, also one that was given
    up."""
    found = victims(request.param)
    yield found
    found.rest()


EACH = pytest.mark.parametrize(
    ("victim", "killed"),
    [(1, ("worker", 0)), (2, ("worker", 0)), (2, ("worker", 1)), (2, ("scheduler", 0))],
    ids=["TP 1, worker", "TP 2, rank 0", "TP 2, rank 1", "TP 2, scheduler"],
    indirect=["victim"],
)
TP_1 = pytest.mark.parametrize("victim", [1], ids=["TP 1"], indirect=True)
TP_2 = pytest.mark.parametrize("victim", [2], ids=["TP 2"], indirect=True)


def survivors(victim: Victim, killed: Killed) -> dict[Killed, int | None]:
    return {key: pid for key, pid in victim.stack.pids().items() if key != killed}


def pids_of_parents(stack: RealStack) -> dict[str, int]:
    return {name: each.pid for name, each in parent_processes(stack.directory).items()}


def of_grammars(stack: RealStack) -> list[psutil.Process]:
    """The processes that have mapped xgrammar: first the host, then those of the grammars."""
    parent = psutil.Process(stack.pid("scheduler")).parent()
    assert parent is not None
    found = [each for each in parent.children(recursive=True) if maps(each.pid, "xgrammar")]
    return sorted(found, key=lambda each: len(each.parents()))


def maps(pid: int, library: str) -> bool:
    try:
        return library in Path(f"/proc/{pid}/maps").read_text()
    except OSError:  # it has just ended
        return False


@EACH
def test_killed_mid_decode(victim: Victim, killed: Killed) -> None:
    """The cache is kept: nothing in it is computed again."""
    stack, before, lost = victim.stack, survivors(victim, killed), victim.stack.load().lost_tokens
    with stack.hold.after(STEPS), open_streams(stack.address, REQUESTS) as streams:
        streams.wait_for_tokens(50)
        host, *_ = wait_for(lambda: of_grammars(stack), "the host of grammars")
        pid = stack.kill(*killed)
        stack.hold.release()
        assert_undamaged(streams.wait_ended(), victim.expected)
    stack.wait_replaced(*killed, pid)
    if "worker" in killed:
        assert stack.load().lost_tokens == lost
    victim.rest()
    assert survivors(victim, killed) == before
    assert host.is_running()
    assert not maps(stack.pid("scheduler"), "libtorch")


@EACH
def test_killed_mid_prompt(victim: Victim, killed: Killed) -> None:
    stack, before, load = victim.stack, survivors(victim, killed), victim.stack.load()
    # Prompts run one after another: workers wait once the first has a token, the others none.
    with stack.hold.after(1), open_streams(stack.address, LONG_PROMPTS) as streams:
        stack.wait_load(lambda now: now.step_tokens > load.step_tokens)
        stack.kill(*killed)
        stack.hold.release()
        assert_undamaged(streams.wait_ended(), victim.expected)
    victim.rest()
    assert survivors(victim, killed) == before


@TP_2
def test_a_killed_scheduler_leaves_the_cache(victim: Victim) -> None:
    """Only tokens of partly filled blocks are computed again, and those that no frontend has."""
    stack, names = victim.stack, LONG[:4]
    requests = {name: REQUESTS[name] for name in names}
    with stack.hold.after(STEPS), open_streams(stack.address, requests) as streams:
        streams.wait_for_tokens(STEPS)
        pid = stack.kill("scheduler")
        stack.hold.release()
        assert_undamaged(streams.wait_ended(), victim.expected)
    stack.wait_replaced("scheduler", 0, pid)
    load = stack.load()
    assert load.sampled_tokens, "it has computed nothing"
    assert load.step_tokens - load.sampled_tokens < len(names) * BLOCK_SIZE


@pytest.mark.parametrize(
    ("victim", "rank", "number"),
    [(1, 0, signal.SIGSEGV), (2, 1, signal.SIGABRT)],
    indirect=["victim"],
)
def test_a_worker_that_crashes_loses_the_cache(
    victim: Victim, rank: int, number: signal.Signals
) -> None:
    """Its signal means that the cache may be damaged."""
    stack, names = victim.stack, LONG[:4]
    lost = stack.load().lost_tokens
    requests = {name: REQUESTS[name] for name in names}
    with stack.hold.after(STEPS), open_streams(stack.address, requests) as streams:
        streams.wait_for_tokens(STEPS)
        pid = stack.signal("worker", rank, number)
        stack.hold.release()
        assert_undamaged(streams.wait_ended(), victim.expected)
    stack.wait_replaced("worker", rank, pid)
    assert stack.load().lost_tokens > lost


@pytest.mark.parametrize(
    ("victim", "service"),
    [(2, "worker"), (1, "scheduler")],
    ids=["TP 2, workers", "TP 1, scheduler"],
    indirect=["victim"],
)
def test_a_restart_leaves_the_cache(victim: Victim, service: str) -> None:
    """The same program continues in another parent process."""
    stack, names = victim.stack, LONG[:4]
    before, parents, lost = stack.pids(), pids_of_parents(stack), stack.load().lost_tokens
    with open_streams(stack.address, {name: REQUESTS[name] for name in names}) as streams:
        streams.wait_for_tokens(STEPS)
        restart(stack.directory, service)
        assert_undamaged(streams.wait_ended(), victim.expected)
    replaced = {name for (name, _), pid in stack.pids().items() if pid not in before.values()}
    others = {name.rpartition("-")[0] for name, pid in pids_of_parents(stack).items()
              if pid != parents[name]}  # fmt: skip
    assert replaced == others == {service}
    load = stack.load()
    if service == "worker":
        assert load.lost_tokens == lost
    else:
        assert load.step_tokens - load.sampled_tokens < (len(names) + 1) * BLOCK_SIZE


@pytest.mark.parametrize(
    ("victim", "service"),
    [(2, "worker"), (2, "scheduler")],
    ids=["TP 2, workers", "TP 2, scheduler"],
    indirect=["victim"],
)
def test_killed_again_and_again(victim: Victim, service: str) -> None:
    """A worker also while it starts and the others wait for it."""
    stack = victim.stack
    with stack.hold, open_streams(stack.address, REQUESTS) as streams:
        for kill in range(3):
            before = streams.num_tokens
            stack.hold.after(STEPS // 3)
            streams.wait_for_tokens(before + 10)
            index = kill % stack.stack.count(service)
            pid = stack.kill(service, index)
            stack.wait_replaced(service, index, pid)
            if service == "worker":
                stack.kill(service, index)
        stack.hold.release()
        assert_undamaged(streams.wait_ended(), victim.expected)


@TP_1
@pytest.mark.parametrize("killed", [("worker",), ("worker", "scheduler")], ids="+".join)
def test_new_streams_wait_for_the_successor(victim: Victim, killed: tuple[str, ...]) -> None:
    """A whole round of streams arrives before the successor is started."""
    stack = victim.stack
    names = [*REQUESTS, *LONG][:16]
    requests = {f"{name} {number}": REQUESTS[name] for number, name in enumerate(names)}
    expected = {each: victim.expected[each.rpartition(" ")[0]] for each in requests}
    parents = [parent_processes(stack.directory)[f"{service}-0"] for service in killed]
    for parent in parents:
        parent.suspend()
    try:
        for service in killed:
            stack.kill(service)
        wait_for(lambda: check_health(stack.address) == NOT_SERVING, "the loss to be noticed")
        with open_streams(stack.address, requests) as streams:
            for parent in parents:
                parent.resume()
            assert_undamaged(streams.wait_ended(), expected)
    finally:
        for parent in parents:
            parent.resume()


@TP_2
def test_a_worker_and_the_scheduler_are_killed(victim: Victim) -> None:
    stack = victim.stack
    with stack.hold.after(STEPS), open_streams(stack.address, REQUESTS) as streams:
        streams.wait_for_tokens(50)
        stack.kill("worker", 1)
        stack.kill("scheduler")
        stack.hold.release()
        assert_undamaged(streams.wait_ended(), victim.expected)


@TP_2
@pytest.mark.parametrize("host_too", [False, True], ids=["grammars", "host and grammars"])
def test_grammars_killed_mid_decode(victim: Victim, host_too: bool) -> None:
    stack, scheduler = victim.stack, victim.stack.pid("scheduler")
    structured = {name: REQUESTS[name] for name in ("schema", "regex", "choice")}
    others = {name: each for name, each in REQUESTS.items() if name not in structured}
    with stack.hold.after(20), open_streams(stack.address, structured) as streams:
        streams.wait_for_tokens(10)
        with open_streams(stack.address, others) as bystanders:
            host, *grammars = of_grammars(stack)
            assert grammars
            killed = [host, *grammars] if host_too else grammars
            for each in killed:
                each.suspend()  # so that none ends with the first
            for each in killed:
                each.kill()
            stack.hold.release()
            found = streams.wait_ended() | bystanders.wait_ended()
    assert_undamaged(found, victim.expected)
    victim.rest()
    assert stack.pid("scheduler") == scheduler


@TP_1
def test_a_restart_says_that_other_files_cost_the_memory(
    victim: Victim, capsys: pytest.CaptureFixture[str]
) -> None:
    stack, names = victim.stack, LONG[:4]
    with open_streams(stack.address, {name: REQUESTS[name] for name in names}) as streams:
        streams.wait_for_tokens(40)
        os.utime(victim.model / "config.json")
        restart(stack.directory, "worker")
        assert_undamaged(streams.wait_ended(), victim.expected)
    said = capsys.readouterr().out
    assert "worker-0: code, settings or model differ, so the memory of the old" in said
    restart(stack.directory, "worker")
    assert "differ" not in capsys.readouterr().out


def size_of_weights(stack: RealStack) -> int:
    """The bytes of the memory files that the worker has mapped and cannot write to."""
    stack.wait_serving()
    maps = Path(f"/proc/{stack.pid('worker')}/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in maps if " r--p " in line and "memfd:" in line]
    return sum(int(end, 16) - int(begin, 16) for begin, end in spans)


@TP_1
def test_a_configuration_that_changes_before_a_fork(victim: Victim) -> None:
    stack, greedy = victim.stack, {"greedy": REQUESTS["greedy"]}
    before, file = pids_of_parents(stack), victim.model / "config.json"
    size = size_of_weights(stack)
    text = file.read_text()
    for changed in (text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 0.01'), text):
        file.write_text(changed)
        pid = stack.kill("worker")
        stack.wait_replaced("worker", 0, pid)
        assert size_of_weights(stack) == size
        found = undisturbed(stack.address, greedy)["greedy"].compare(victim.expected["greedy"])
        assert bool(found.differences) == (changed != text)  # it is another model
    assert pids_of_parents(stack) == before
