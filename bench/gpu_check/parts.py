"""Runs the parts of a section one after another."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from bench.gpu_check.records import Report, SkipPart

Setup = TypeVar("Setup")

EXIT_DEVICE_LOST = 70


@dataclass(frozen=True)
class PartPlan(Generic[Setup]):
    name: str
    run: Callable[[Setup, Report], object]
    limit_s: float = 60.0


def run_parts(parts: Sequence[PartPlan[Setup]], setup: Setup, report: Report) -> None:
    """Those that have no record yet.

    Raises:
        SystemExit: the GPU is lost to this process.
    """
    records = report.read()
    if not records.limits:
        report.plan({part.name: part.limit_s for part in parts})
    for part in parts:
        if part.name in records.parts:
            continue
        report.start(part.name)
        try:
            part.run(setup, report)
        except SkipPart as reason:
            report.end("skipped", str(reason))
        except Exception as error:
            report.end("error", "".join(traceback.format_exception(error)))
            if is_lost(error):
                sys.exit(EXIT_DEVICE_LOST)
        else:
            report.end("done")


def is_lost(error: Exception) -> bool:
    """Errors of CUDA are sticky: every later call in this process fails too. By name, so that this
    module does without torch."""
    return type(error).__name__ == "AcceleratorError" or "CUDA error" in str(error)
