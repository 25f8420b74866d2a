"""Commands for RUNTIME=native: stacks that run as processes on this host."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from deploy.errors import LaunchError, StartError
from deploy.first_tokens import PROMPT, curl_example, show_completion
from deploy.health import SERVING
from deploy.logs import follow
from deploy.native.guards import ignore_signals, locked, signals_interrupt
from deploy.native.processes import (
    is_running,
    replace_supervisor,
    stack_members,
    start_supervisor,
    stop_stack,
)
from deploy.native.progress import show_progress
from deploy.native.scale import scale as scale_stack
from deploy.native.startup import wait_until_serving
from deploy.native.status import format_status, stack_status, status_json, supervisor_status
from deploy.plan import Environment, Layout, plan_stack, read_settings
from deploy.ports import free_port, reserve_ports
from deploy.stack import RUN, Stack, check_directory, first_token, run_directory
from shared.config import PREFIX


def up(environment: Environment, layout: Layout) -> int:
    """Starts a stack in the background; returns 0 once it has answered a request."""
    port, directory = _named(environment)
    with locked(directory):
        if supervisor := replace_supervisor(directory):
            return _supervised_again(Stack.load(directory), supervisor)
        if is_running(directory):
            return _already_up(Stack.load(directory))
        _start(environment, layout, directory, port)
    return 0


def serve(environment: Environment, layout: Layout) -> int:
    """Starts a stack, follows its logs, and stops it on a stop signal, or if this process dies."""
    port, directory = _named(environment)
    with locked(directory):
        if is_running(directory):
            raise LaunchError(f"PORT: a stack is already running on port {port}")
        supervisor = _start(environment, layout, directory, port, tied=True)
    follower = ["tail", "-n", "0", "-F", f"--pid={os.getpid()}"]
    logs = subprocess.Popen([*follower, *sorted(directory.glob("*-*.log"))])
    try:
        with signals_interrupt():
            _wait_for_end(supervisor)
    except KeyboardInterrupt:
        return 0
    finally:
        ignore_signals()
        stop_stack(directory, print)
        logs.terminate()


def run(environment: Environment, layout: Layout) -> int:
    """Starts a private stack and prints `READY HOST:PORT`; stops it and returns when stdin closes
    or a stop signal arrives. The stack also stops if this process is killed."""
    environment = {f"{PREFIX}HTTP_PORT": "0", f"{PREFIX}UI_PORT": "0"} | environment
    settings = read_settings(environment)
    try:
        temporary = tempfile.TemporaryDirectory(prefix="nano-", ignore_cleanup_errors=True)
    except OSError as error:  # such as a full disk
        raise LaunchError(f"there is no temporary directory: {error.strerror}") from error
    with temporary, signals_interrupt():
        directory = Path(temporary.name)
        try:
            threading.Thread(target=_interrupt_at_end_of_input, daemon=True).start()
            port = settings.port or free_port(settings.host)
            with reserve_ports(settings.host, port):
                stack, shared = plan_stack(environment, layout, directory, port)
                supervisor = start_supervisor(stack, shared, tied=True, temporary=True)
                wait_until_serving(stack, lambda _: None, supervisor)
                replace(stack, was_up=True).save()
            print(f"READY {stack.address}", flush=True)
            _wait_for_end(supervisor)
        except KeyboardInterrupt:
            return 0
        except StartError as error:  # its log is removed
            raise LaunchError(error.reason) from error
        finally:
            ignore_signals()
            stop_stack(directory, lambda _: None)


def _interrupt_at_end_of_input() -> None:
    while os.read(sys.stdin.fileno(), 1 << 16):
        pass
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


def _wait_for_end(supervisor: subprocess.Popen[bytes]) -> NoReturn:
    supervisor.wait()
    raise LaunchError("the supervisor ended; stopping the stack")


def _named(environment: Environment) -> tuple[int, Path]:
    """The port that names a stack, and its directory."""
    port = read_settings(environment).port
    if port == 0:
        raise LaunchError("PORT: must not be 0, because it names the stack; only run accepts 0")
    return port, run_directory(port)


def directory_of(environment: Environment) -> Path:
    """The directory of the stack on the port that `environment` names."""
    return run_directory(read_settings(environment).port)


def _start(
    environment: Environment, layout: Layout, directory: Path, port: int, *, tied: bool = False
) -> subprocess.Popen[bytes]:
    """Starts a stack, and shows its progress and its answer to a first request. Returns its
    supervisor."""
    stop_stack(directory, print)  # leftovers of a killed supervisor
    stack, shared = plan_stack(environment, layout, directory, port)
    serves_public = stack.count("frontend") > 0
    ports = (stack.port, stack.http_port) if serves_public else ()
    with reserve_ports(stack.host, *ports), signals_interrupt():
        supervisor = start_supervisor(stack, shared, tied=tied)
        try:
            with show_progress(stack) as report:
                wait_until_serving(stack, report, supervisor)
            replace(stack, was_up=True).save()
            if serves_public:
                _greet(stack)
        except BaseException:
            ignore_signals()
            print("stopping the stack", file=sys.stderr)
            stop_stack(directory, print)
            raise
    return supervisor


def down(environment: Environment) -> int:
    """Stops a stack, or the processes that are left of one."""
    return _down(directory_of(environment))


def _down(directory: Path) -> int:
    if stack_members(directory):
        print(f"stopping the stack on port {directory.name}", flush=True)
    count = stop_stack(directory, print)
    _remove_if_empty(directory)
    print(f"stopped {count} processes" if count else f"nothing runs on port {directory.name}")
    return 0


def _remove_if_empty(directory: Path) -> None:
    """Removes the directory of a stopped stack unless it has files, such as logs. A lock that no
    command holds does not count."""
    if not directory.exists():
        return
    with suppress(LaunchError), locked(directory):
        if all(path.is_dir() or path.name.endswith("lock") for path in directory.rglob("*")):
            shutil.rmtree(directory)


def down_all() -> int:
    """Stops all stacks that were started in this directory."""
    directories = [path for path in RUN.glob("*") if path.name.isdecimal() and stack_members(path)]
    for directory in sorted(directories, key=lambda path: int(path.name)):
        _down(directory)
    if not directories:
        print(f"no stack runs in {RUN.absolute()}")
    return 0


def scale(environment: Environment, engines: int) -> int:
    """Starts or stops engines of a running stack until it has this number."""
    return scale_stack(directory_of(environment), engines)


def logs(environment: Environment, service: str | None) -> NoReturn:
    """Follows the logs of a stack, of all its services or one."""
    follow(directory_of(environment), service)


def ps(environment: Environment, as_json: bool = False) -> int:
    """Prints a line per process, or a list in JSON; returns 1 if no stack is running."""
    directory = directory_of(environment)
    check_directory(directory)
    try:
        stack = Stack.load(directory)
        statuses = [supervisor_status(stack), *stack_status(stack)]
        print(status_json(statuses) if as_json else format_status(statuses))
        if stack.http_port and not as_json:
            print(f"The frontends serve HTTP on {stack.url}.")
    except LaunchError:
        if as_json:
            print("[]")
            return 1
        left = len(stack_members(directory))
        rest = f", but {left} processes are left of one; make down ends them" if left else ""
        print(f"no stack runs on port {directory.name}{rest}")
        return 1
    return 0


def _supervised_again(stack: Stack, supervisor: subprocess.Popen[bytes]) -> int:
    with show_progress(stack) as report:
        wait_until_serving(stack, report, supervisor)
    if not stack.was_up:
        replace(stack, was_up=True).save()
    print(f"the stack on port {stack.port} is up, and has a supervisor again")
    return 0


def _already_up(stack: Stack) -> int:
    if all(status.health == SERVING for status in stack_status(stack)):
        print(f"the stack on port {stack.port} is already up, unchanged; make down stops it")
        return 0
    raise LaunchError(
        f"PORT: the stack on port {stack.port} is already running but does not serve; "
        "make ps and make logs show why, make down stops it"
    )


def _greet(stack: Stack) -> None:
    """Shows a completion, and says how to request more."""
    token = first_token(stack.auth_tokens_file)
    show_completion(stack.address, stack.public_tls, token)
    http_example = ""
    if stack.http_port:
        http_example = curl_example(stack.url, stack.model, stack.public_tls, bool(token))
    http = f" and {stack.url}" if stack.url else ""
    ui = f"\nIts dashboard is {stack.dashboard_url}." if stack.ui_port else ""
    print(f"The stack serves on {stack.address}{http}.{ui}")
    if stack.public_tls or token:
        needed = "the certificate's authority" * bool(stack.public_tls), "a token" * bool(token)
        print(f"""Clients need {" and ".join(filter(None, needed))} (docs/deploy/security.md).
make chat PORT={stack.port} reads NANO_TLS_CA and NANO_TOKEN.
{http_example.rstrip()}""")
    else:
        print(f"""Send more:

  make chat PORT={stack.port}
{http_example}\
  grpcurl -plaintext -d '{{"text": "{PROMPT}", "sampling": {{"max_tokens": 32}}}}' \\
    {stack.address} nanovllm.v1.InferenceService/GenerateStream
  .venv/bin/python -c 'from nano_vllm_grpc import LLM
print(LLM("{stack.address}").generate(["{PROMPT}"])[0]["text"])'""")
    print(f"""
make ps, make logs and make down, each with PORT={stack.port}, show it and stop it.""")
    sys.stdout.flush()  # serve prints nothing more
