"""supervisord's configuration file for a stack.

Settings travel in supervisord's own environment, which its children inherit, and so need no
escaping here; only paths and numbers remain.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from deploy.stack import MODULES, SERVICES, Stack
from shared.fork import CANNOT_START

_KILL_AFTER_S = 5.0  # beyond a service's own grace period
_NEVER_GIVE_UP = 1_000_000
_MIN_DESCRIPTORS = 64  # by default supervisord refuses to run with fewer than 1,024


def stop_timeout_s(stack: Stack) -> float:
    """Seconds that a process has to end on its own before it is killed."""
    return stack.drain_timeout_s + _KILL_AFTER_S


def render_config(stack: Stack, private: bool = False) -> str:
    """Returns the text of supervisord.conf."""
    return "\n".join([_supervisord(stack.directory), *_programs(stack, private)])


def control_socket(directory: Path) -> str:
    """The path of supervisord's socket, in the form that supervisord needs.

    It makes relative paths absolute, and may make them longer than a socket's path can be. This
    one is absolute already, yet hardly longer than the relative one.
    """
    return str(Path("/proc/self/cwd", directory, "supervisor.sock"))


def _supervisord(directory: Path) -> str:
    return f"""\
[supervisord]
nodaemon = true
silent = true
logfile = {_escape(directory / "supervisord.log")}
logfile_maxbytes = 10MB
logfile_backups = 1
pidfile = {_escape(directory / "supervisord.pid")}
minfds = {_MIN_DESCRIPTORS}

[unix_http_server]
file = {_escape(control_socket(directory))}

[rpcinterface:supervisor]
supervisor.rpcinterface_factory = supervisor.rpcinterface:make_main_rpcinterface
"""


def _programs(stack: Stack, private: bool) -> list[str]:
    directory = _escape(shlex.quote(str(stack.directory)))
    arguments = {
        "worker": " --rank %(process_num)d",
        "frontend": " --index %(process_num)d",
        "page": f" {directory}",
    }
    programs = []
    for priority, service in enumerate(SERVICES, start=1):
        if count := stack.count(service):
            module = MODULES[service] + arguments.get(service, "")
            first = stack.first_index(service)
            programs.append(_program(stack, service, module, priority, count, first))
    # Last to start and first to stop: a supervisord that is stopping the stack need not answer.
    module = f"deploy.watchdog {directory}"
    module += " --private" if private else ""
    # Nobody else would start it again if it could not start.
    programs.append(_program(stack, "watchdog", module, len(SERVICES) + 1, restart="true"))
    return programs


def _program(
    stack: Stack,
    name: str,
    module: str,
    priority: int,
    count: int = 1,
    first: int = 0,
    restart: str = "unexpected",
) -> str:
    # -P: modules come from the installation, never from the user's current directory.
    command = f"{_escape(shlex.quote(sys.executable))} -P -m {module}"
    # startsecs 0: supervisord would retry a process that ends sooner, whatever its exit status. So
    # it is RUNNING at once, and its health says when it really is. The only failures to start that
    # supervisord still counts are a lack of memory, or of space for a log.
    return f"""\
[program:{name}]
command = {command}
process_name = %(program_name)s-%(process_num)d
numprocs = {count}
numprocs_start = {first}
priority = {priority}
startsecs = 0
startretries = {_NEVER_GIVE_UP}
autorestart = {restart}
exitcodes = {CANNOT_START}
stopwaitsecs = {round(stop_timeout_s(stack))}
killasgroup = true
redirect_stderr = true
stdout_logfile = {_escape(stack.directory)}/%(program_name)s-%(process_num)d.log
stdout_logfile_maxbytes = 10MB
stdout_logfile_backups = 2
"""


def _escape(value: object) -> str:
    return str(value).replace("%", "%%")
