"""A private stack, which starts for one program and ends with it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path
from typing import IO, Self

from nano_vllm_grpc.errors import StackError

# Another project may have a folder `cli`, too.
IS_CHECKOUT = (Path(__file__).parents[1] / "protos" / "frontend.proto").exists()
_STOP_TIMEOUT_S = 30.0
_REASON_LINES = 12


class PrivateStack:
    """Runs `python -m cli run` and stops it on `close`, when collected, or at exit.

    The launcher stops the stack when its stdin closes, so nothing is left behind even if the
    program that owns it is killed.

    Args:
        model: directory of the model.
        variables: those of `make up`, in lower case, such as `tp=2` or `max_num_seqs=64`, or as
            vLLM names them, such as `tensor_parallel_size=2`.

    Raises:
        StackError: the stack did not start, and the message is the launcher's. Or this is an
            installed client, which has no launcher.
    """

    address: str

    def __init__(self, model: str | os.PathLike[str], **variables: object) -> None:
        if not IS_CHECKOUT:
            raise StackError(
                "a private stack needs a checkout of nano-vllm-grpc, but this client was installed "
                "without one; give the address of a server"
            )
        flags = {"port": 0, "model": Path(model), **variables}
        command = [sys.executable, "-P", "-m", "cli", "run"]
        for name, value in flags.items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # Ctrl-C must reach only this program
            )
            self._finalizer = weakref.finalize(self, _stop, process)
            address = _await_ready(process)
            if address is None:
                self.close()
                raise StackError(f"the stack did not start: {_reason(errors)}")
        self.address = address

    def close(self) -> None:
        """Stops the stack; safe to call more than once."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _await_ready(process: subprocess.Popen[bytes]) -> str | None:
    """Returns the address in the `READY host:port` line, or None if the launcher printed none."""
    assert process.stdout is not None
    for line in process.stdout:
        word, _, address = line.decode(errors="replace").strip().partition(" ")
        if word == "READY":
            return address
    return None


def _stop(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()  # its children notice and stop
        process.wait()
    process.stdout.close()


def _reason(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return "\n".join(lines[-_REASON_LINES:]) or "the launcher gave no reason"
