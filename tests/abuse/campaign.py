"""Plays attacks on a stack, one after another, and measures what honest clients see of each.

A round of an attack is three windows, close to each other because the machine is noisy:
undisturbed; the attack; and a *control*, in which processes that have nothing to do with the stack
burn as much CPU as the attacker and the stack's own extra work did.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from tests.abuse import attacker
from tests.abuse.attack import Attack
from tests.abuse.burner import burn
from tests.abuse.child import Child
from tests.abuse.figures import Figures
from tests.abuse.observer import STREAMS
from tests.abuse.report import Report, Result, Round
from tests.abuse.rig import Rig, running_rig
from tests.abuse.usage import MemoryPeaks, cpu_s, memory_mb
from tests.waiting import wait_for

_SETTLE_S = 10.0  # until the stack has only the honest streams again; if not, that is no problem
_MAX_BURNERS = 8


def run_campaign(
    attacks: list[Attack],
    seconds: float,
    rounds: int,
    *,
    report_attack: Callable[[str], None],
    out: Path | None,
) -> Report:
    """Plays each attack `rounds` times for `seconds`.

    Args:
        report_attack: is called with the name of each attack before it begins.
        out: a JSON file for the report, written again after each attack.
    """
    report, started = Report(seconds, rounds), time.monotonic()
    with ExitStack() as open_rig:
        rig: Rig | None = None
        for attack in attacks:
            report_attack(attack.name)
            result = Result(attack.name, attack.about, bool(attack.kills), attack.anonymous)
            for _ in range(rounds):
                if rig is None or rig.anonymous != attack.anonymous:
                    open_rig.close()
                    rig = open_rig.enter_context(running_rig(anonymous=attack.anonymous))
                result.rounds.append(play_round(rig, attack, seconds))
                if result.rounds[-1].broken:  # the next needs another
                    rig = None
            report.results.append(result)
            report.seconds_in_all = time.monotonic() - started
            if out is not None:
                report.save(out)
    return report


def play_round(rig: Rig, attack: Attack, seconds: float) -> Round:
    """Plays an attack for `seconds` between windows without it."""
    directory = rig.stack.directory
    began_at, used = time.monotonic(), cpu_s(directory)
    none = _window(rig, seconds)
    usual = _cores(used, cpu_s(directory), time.monotonic() - began_at)
    pids, before_mb = rig.stack.pids(), memory_mb(directory)
    address = rig.address(attack.interface)
    with Child(attacker.attack, attack.name, address, rig.attackers_token, seconds) as child:
        child.receive()
        rig.begin()
        used = cpu_s(directory)
        with MemoryPeaks(directory) as memory:
            child.send("go")
            _kill(rig, attack, seconds)
            played: attacker.Played = child.receive()
        busy = _cores(used, cpu_s(directory), played.seconds)
        attacked = rig.end()
    recovers = _settle(rig)
    extra = sum((busy - usual).values())
    cores = played.cpu_s / played.seconds
    died = [f"{s}-{i} that died" for (s, i), pid in rig.stack.pids().items() if pid != pids[s, i]]
    if attack.kills:
        died = []
    if not recovers:
        died.append("stack that does not serve again")
    return Round(
        none=none,
        attack=attacked,
        control=_control(rig, attack, cores + extra, seconds) if recovers else none,
        attackers_cores=cores,
        extra_cores=extra,
        memory_before_mb=dict(before_mb),
        memory_peak_mb=memory.peaks_mb,
        memory_after_mb=dict(memory_mb(directory)),
        died=died,
        gains=played.gains,
    )


def _window(rig: Rig, seconds: float, attack: Attack | None = None) -> Figures:
    """Measures for `seconds` without an attacker, but with the death that the attack includes."""
    rig.begin()
    began_at = time.monotonic()
    if attack is not None:
        _kill(rig, attack, seconds)
    time.sleep(max(0.0, began_at + seconds - time.monotonic()))
    return rig.end()


def _control(rig: Rig, attack: Attack, cores: float, seconds: float) -> Figures:
    """Measures while processes of their own burn as much as `cores` cores."""
    processes = math.ceil(min(cores, _MAX_BURNERS))
    with ExitStack() as burning:
        for _ in range(processes):
            share = min(1.0, cores / processes)
            burning.enter_context(Child(burn, share)).receive()
        figures = _window(rig, seconds, attack)
    _settle(rig)
    return figures


def _kill(rig: Rig, attack: Attack, seconds: float) -> None:
    """Kills what the attack needs dead, halfway through."""
    if attack.kills:
        time.sleep(seconds / 2)
        rig.stack.kill(attack.kills)


def _settle(rig: Rig) -> bool:
    """Returns once all serve and only the honest streams are left, or after a while. Returns
    whether all serve."""
    try:
        rig.stack.wait_serving()
    except TimeoutError:
        return False

    def settled() -> bool:
        load = rig.stack.load()
        return load.waiting + load.running <= STREAMS

    with suppress(TimeoutError):
        wait_for(settled, "the attacker's requests to end", _SETTLE_S)
    return True


def _cores(before: Counter[str], after: Counter[str], seconds: float) -> Counter[str]:
    """The cores used by each program."""
    return Counter({name: (after[name] - before[name]) / seconds for name in after})
