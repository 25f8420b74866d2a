"""Plays attacks on a stack, one after another, and measures what honest clients see of each.

A round of an attack is three windows, close to each other because the machine is noisy:
undisturbed; the attack; and a *control*, in which processes that have nothing to do with the stack
burn as much CPU as the attacker and the stack's own extra work did.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

from deploy.native.processes import stack_members
from tests.abuse import attacker
from tests.abuse.attack import Attack
from tests.abuse.burner import burn
from tests.abuse.child import Child
from tests.abuse.figures import Figures
from tests.abuse.observer import STREAMS
from tests.abuse.report import Report, Result, Round
from tests.abuse.rig import Rig, running_rig
from tests.waiting import wait_for

_WINDOW_S = 1.5
_ROUNDS = 3
_SETTLE_S = 10.0  # until the stack has only the honest streams again; if not, that is no problem
_MAX_BURNERS = 8


def run_campaign(
    attacks: list[Attack], report_attack: Callable[[str], None], out: Path | None
) -> Report:
    """Plays each attack in several rounds.

    Args:
        report_attack: is called with the name of each attack before it begins.
        out: a JSON file for the report, written again after each attack.
    """
    report, started = Report(_WINDOW_S, _ROUNDS), time.monotonic()
    with ExitStack() as open_rig:
        rig: Rig | None = None
        for attack in attacks:
            report_attack(attack.name)
            report.results.append(result := Result(attack))
            for _ in range(_ROUNDS):
                if rig is None or rig.anonymous != attack.anonymous:
                    open_rig.close()
                    rig = open_rig.enter_context(running_rig(anonymous=attack.anonymous))
                result.rounds.append(_play_round(rig, attack))
                if result.rounds[-1].broken:  # the next needs another
                    rig = None
            report.seconds = time.monotonic() - started
            if out is not None:
                report.save(out)
    return report


def _play_round(rig: Rig, attack: Attack) -> Round:
    """Plays an attack between windows without it."""
    began_at, used = time.monotonic(), _cpu_s(rig)
    none = _window(rig)
    usual = (_cpu_s(rig) - used) / (time.monotonic() - began_at)
    pids = rig.stack.pids()
    address = rig.address(attack.interface)
    with Child(attacker.attack, attack.name, address, rig.attackers_token, _WINDOW_S) as child:
        child.receive()
        rig.begin()
        used = _cpu_s(rig)
        child.send("go")
        _kill(rig, attack)
        played: attacker.Played = child.receive()
        extra = (_cpu_s(rig) - used) / played.seconds - usual
        attacked = rig.end()
    recovers = _settle(rig)
    cores = played.cpu_s / played.seconds
    died = [f"{s}-{i} that died" for (s, i), pid in rig.stack.pids().items() if pid != pids[s, i]]
    if attack.kills:
        died = []
    if not recovers:
        died.append("stack that does not serve again")
    control = _control(rig, attack, cores + extra) if recovers else none
    return Round(none, attacked, control, cores, extra, died, played.gains)


def _window(rig: Rig, attack: Attack | None = None) -> Figures:
    """Measures without an attacker, but with the death that the attack includes."""
    rig.begin()
    began_at = time.monotonic()
    if attack is not None:
        _kill(rig, attack)
    time.sleep(max(0.0, began_at + _WINDOW_S - time.monotonic()))
    return rig.end()


def _control(rig: Rig, attack: Attack, cores: float) -> Figures:
    """Measures while processes of their own burn as much as `cores` cores."""
    processes = math.ceil(min(cores, _MAX_BURNERS))
    with ExitStack() as burning:
        for _ in range(processes):
            share = min(1.0, cores / processes)
            burning.enter_context(Child(burn, share)).receive()
        figures = _window(rig, attack)
    _settle(rig)
    return figures


def _kill(rig: Rig, attack: Attack) -> None:
    """Kills what the attack needs dead, halfway through."""
    if attack.kills:
        time.sleep(_WINDOW_S / 2)
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


def _cpu_s(rig: Rig) -> float:
    """The CPU seconds that the stack's processes have used, with those of their children that have
    ended, which they have waited for: grammars' processes above all."""
    used = 0.0
    for process in stack_members(rig.stack.directory):
        with suppress(psutil.Error):
            used += sum(process.cpu_times()[:4])  # user, system, and its children's
    return used
