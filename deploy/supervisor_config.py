"""supervisord's configuration file for a stack.

Settings travel in supervisord's own environment, which its children inherit, and so need no
escaping here; only paths and numbers remain.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from deploy.stack import MODULES, SERVICES, Process, Stack, replace_file
from shared.process.fork import CANNOT_START

_KILL_AFTER_S = 5.0  # beyond a service's own grace period
_NEVER_GIVE_UP = 1_000_000
_MIN_DESCRIPTORS = 64  # by default supervisord refuses to run with fewer than 1,024


def stop_timeout_s(stack: Stack) -> float:
    """Seconds that a process has to end on its own before it is killed."""
    return stack.drain_timeout_s + _KILL_AFTER_S


def render_config(stack: Stack, tied: bool = False) -> str:
    """Returns the text of supervisord.conf."""
    return "\n".join([_supervisord(stack.directory), *_programs(stack, tied)])


def write_config(stack: Stack, tied: bool = False) -> None:
    """Writes supervisord.conf, which a supervisord that is started, or told to, reads."""
    replace_file(stack.directory / "supervisord.conf", render_config(stack, tied))


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


def _programs(stack: Stack, tied: bool) -> list[str]:
    groups: dict[str, list[Process]] = {}
    programs = []
    for process in stack.processes():
        groups.setdefault(process.group, []).append(process)
        words = [MODULES[process.service], *_arguments(stack, process)]
        programs.append(_program(stack, process.name, words))
    for name, members in groups.items():
        programs.append(_group(name, members, SERVICES.index(members[0].service) + 1))
    # Last to start and first to stop: a supervisord that is stopping the stack need not answer.
    words = ["deploy.watchdog", str(stack.directory), *(["--tied"] if tied else [])]
    # Nobody else would start it again if it could not start.
    watchdog = Process("watchdog", 0, "")
    programs.append(_program(stack, watchdog.name, words, restart="true"))
    programs.append(_group(watchdog.group, [watchdog], len(SERVICES) + 1))
    return programs


def _arguments(stack: Stack, process: Process) -> list[str]:
    """What sets a process apart from those that share its environment, in which are the settings of
    engine 0."""
    flags: dict[str, object] = {}
    if process.engine:
        flags["index"] = process.index
        flags["engine-name"] = process.engine
        flags["worker-addresses"] = ",".join(stack.worker_addresses_of(process.engine))
        if process.service == "scheduler":
            flags["scheduler-address"] = process.address
        elif stack.master_ports:
            flags["master-port"] = stack.master_ports[process.engine - 1]
    if stack.model_path and process.service != "page":
        flags["model"] = stack.model_link(process.engine)
    if process.service == "worker":
        if stack.engines > 1:
            flags["engines-on-host"] = stack.engines
        flags["rank"] = process.index % stack.tp
    if process.service == "frontend":
        flags["index"] = process.index
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [str(stack.directory)] if process.service == "page" else words


def _group(name: str, members: list[Process], priority: int) -> str:
    return f"""\
[group:{name}]
programs = {",".join(each.name for each in members)}
priority = {priority}
"""


def _program(stack: Stack, name: str, words: list[str], restart: str = "unexpected") -> str:
    # -P: modules come from the installation, never from the user's current directory.
    command = _escape(shlex.join([sys.executable, "-P", "-m", *words]))
    # startsecs 0: supervisord would retry a process that ends sooner, whatever its exit status. So
    # it is RUNNING at once, and its health says when it really is. The only failures to start that
    # supervisord still counts are a lack of memory, or of space for a log.
    return f"""\
[program:{name}]
command = {command}
startsecs = 0
startretries = {_NEVER_GIVE_UP}
autorestart = {restart}
exitcodes = {CANNOT_START}
stopwaitsecs = {round(stop_timeout_s(stack))}
killasgroup = true
redirect_stderr = true
stdout_logfile = {_escape(stack.directory)}/{name}.log
stdout_logfile_maxbytes = 10MB
stdout_logfile_backups = 2
"""


def _escape(value: object) -> str:
    return str(value).replace("%", "%%")
