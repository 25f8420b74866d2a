"""supervisord as the launcher starts it: `python -m deploy.supervise CONFIG [--tied-to PID]
[--remove]`.

With `--tied-to`, the stack belongs to the process PID: once that is gone, however it ended, the
stack is stopped in order and, with `--remove`, its directory removed.
"""

from __future__ import annotations

import argparse
import shutil
import signal
from pathlib import Path

from supervisor import supervisord

from shared.process.parent import end_with_parent
from shared.process.run import raise_descriptor_limit
from shared.telemetry.log_output import shield_stderr


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m deploy.supervise")
    parser.add_argument("config", type=Path)
    parser.add_argument("--tied-to", type=int, metavar="PID")
    parser.add_argument("--remove", action="store_true", help="the directory, at the end")
    args = parser.parse_args()
    if args.tied_to is not None:
        end_with_parent(args.tied_to, signal.SIGTERM)  # on which supervisord stops
    raise_descriptor_limit()
    # supervisord reports on stderr that a log, its own or a process's, cannot be written. If that
    # failed too, as on a full disk, it would end, and the stack with it.
    shield_stderr(lambda count: f"{count} lines were dropped")
    try:
        supervisord.main(["-c", str(args.config)])
    finally:
        if args.remove:
            shutil.rmtree(args.config.parent, ignore_errors=True)


if __name__ == "__main__":
    main()
