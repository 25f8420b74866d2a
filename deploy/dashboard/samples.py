"""Samples of the engines' load, one per second, for charts."""

from __future__ import annotations

import json
import re
import time
from http.client import HTTPException
from typing import Required, TypedDict

from deploy.engines import ask_loads
from deploy.health import fetch
from deploy.stack import Stack

_TIMEOUT_S = 1.0
_FIRST_TOKEN = re.compile(
    rb"^nanovllm:time_to_first_token_seconds_(sum|count)(?:\{.*\})? (\S+)$", re.MULTILINE
)


class Sample(TypedDict, total=False):
    """The work of all engines since the previous sample. An unknown figure is left out; a mean of
    no events is None."""

    at: Required[float]  # time.monotonic
    tokens_per_s: float | None
    stages: int  # of an engine's pipeline
    running: int
    waiting: int  # or swapped
    cache: float  # share of blocks in use
    step_s: float | None  # mean over engines
    accepted_per_step: float | None  # drafted tokens that were accepted, mean over steps
    first_token_s: float | None  # mean


class Sampler:
    """Takes samples. `take` blocks: call it on a thread."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._last: dict[str, tuple[float, ...]] = {}

    def take(self) -> Sample:
        sample = Sample(at=time.monotonic(), first_token_s=self._first_token_s())
        answers = ask_loads(self._stack.reloaded(), _TIMEOUT_S)
        loads = {engine: load for engine, load in enumerate(answers) if load is not None}
        if loads:
            sample["stages"] = max(load.num_stages for load in loads.values())
            sample["running"] = sum(load.running for load in loads.values())
            sample["waiting"] = sum(load.waiting + load.swapped for load in loads.values())
            used = sum(load.blocks_used for load in loads.values())
            sample["cache"] = used / sum(load.blocks for load in loads.values())
            rates, steps_s = [], []
            all_accepted = all_steps = 0.0
            for engine, load in loads.items():
                elapsed_s, tokens, steps, accepted = self._since(
                    f"engine-{engine}",
                    sample["at"],
                    load.sampled_tokens,
                    load.steps,
                    load.accepted_tokens,
                )
                all_accepted, all_steps = all_accepted + accepted, all_steps + steps
                rates += [tokens / elapsed_s] if elapsed_s else []
                steps_s += [load.step_time_s] if steps else []
            sample["tokens_per_s"] = sum(rates) if rates else None
            sample["step_s"] = sum(steps_s) / len(steps_s) if steps_s else None
            sample["accepted_per_step"] = all_accepted / all_steps if all_steps else None
        return sample

    def _first_token_s(self) -> float | None:
        """The mean time to first token since the last sample, from the frontends' metrics."""
        seconds = count = 0.0
        for file in self._stack.metrics_directory.glob("frontend-*.json"):
            try:
                target = json.loads(file.read_bytes())[0]["targets"][0]
                body = fetch(f"http://{target}/metrics", _TIMEOUT_S)
            except (OSError, HTTPException, ValueError, LookupError):  # not running
                continue
            values = {name: float(value) for name, value in _FIRST_TOKEN.findall(body)}
            new = self._since(file.name, values.get(b"sum", 0.0), values.get(b"count", 0.0))
            seconds, count = seconds + new[0], count + new[1]
        return seconds / count if count else None

    def _since(self, name: str, *counts: float) -> tuple[float, ...]:
        """Returns the growth of the counts since the last call; zeros after the first call or a
        reset."""
        last = self._last.get(name, counts)
        self._last[name] = counts
        new = tuple(now - before for now, before in zip(counts, last, strict=True))
        return new if min(new) >= 0 else (0.0,) * len(counts)
