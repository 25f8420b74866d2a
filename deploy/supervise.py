"""supervisord as the launcher starts it: `python -m deploy.supervise CONFIG [--tied-to PID]`.

With `--tied-to`, the stack is private to the process PID: when that is gone, however it went, the
stack is stopped in order and its directory removed.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import signal
from pathlib import Path

from supervisor import supervisord

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m deploy.supervise")
    parser.add_argument("config", type=Path)
    parser.add_argument("--tied-to", type=int, metavar="PID")
    args = parser.parse_args()
    if args.tied_to is not None:
        _end_with_parent(args.tied_to)
    try:
        supervisord.main(["-c", str(args.config)])
    finally:
        if args.tied_to is not None:
            shutil.rmtree(args.config.parent, ignore_errors=True)


def _end_with_parent(parent: int) -> None:
    """Has the kernel send this process SIGTERM, on which supervisord stops, when `parent` dies."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it died before
        raise SystemExit(1)


if __name__ == "__main__":
    main()
