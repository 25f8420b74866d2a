"""`python -m bench.gpu_check.section NAME ...`: one section, in this process; see `runner`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.gpu_check.gpu import gpu_setup
from bench.gpu_check.parts import run_parts
from bench.gpu_check.records import Report
from bench.gpu_check.sections import SECTIONS


def main(args: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_check.section")
    parser.add_argument("name", choices=[section.name for section in SECTIONS])
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--directory", type=Path, required=True, help="for models")
    parser.add_argument("--model", type=Path, required=True, help="of the needs_model sections")
    parser.add_argument("--peer", type=Path)
    parser.add_argument("--seed", type=int, required=True)
    options = parser.parse_args(args)
    setup = gpu_setup(options.directory, options.model, options.peer, options.seed)
    section = next(section for section in SECTIONS if section.name == options.name)
    parts = importlib.import_module(section.module).parts(setup)
    run_parts(parts, setup, Report(options.records))


if __name__ == "__main__":
    main(sys.argv[1:])
