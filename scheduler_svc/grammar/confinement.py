"""Confines a process to its memory and its open descriptors. Nothing can undo this.

A seccomp filter (Linux 3.5) allows the few system calls that computing needs. Landlock (Linux 5.13)
denies files, and more in later kernels. A kernel that lacks one may have the other.

The filter lists the allowed system calls, so that system calls of later kernels stay denied. strace
shows nine of them in use; the others leave room for new versions of glibc and xgrammar.
"""

from __future__ import annotations

import ctypes
import os
import struct
from enum import IntFlag

import structlog

log = structlog.get_logger(__name__)

_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_PR_SET_NO_NEW_PRIVS = 38

# The architecture (include/uapi/linux/audit.h), and the column of its numbers below.
_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_ALLOWED = {  # the most frequent first
    "recvfrom": (45, 207),
    "sendto": (44, 206),
    "setitimer": (38, 103),
    "clock_gettime": (228, 113),
    "futex": (202, 98),
    "mmap": (9, 222),
    "munmap": (11, 215),
    "brk": (12, 214),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "mprotect": (10, 226),
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "sched_yield": (24, 124),
    "getrandom": (318, 278),
    "getpriority": (140, 141),
    "setpriority": (141, 140),
    "getpid": (39, 172),
    "gettid": (186, 178),
    "tgkill": (234, 131),  # abort()
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "restart_syscall": (219, 128),
    "exit": (60, 93),
    "exit_group": (231, 94),
}

# Classic BPF (include/uapi/linux/bpf_common.h) on a seccomp_data: the system call's number, the
# architecture, an address, and six arguments of 64 bits.
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16
_ALLOW, _DENY = 0x7FFF0000, 0x00050001  # with EPERM

# These numbers are the same on all architectures.
_LANDLOCK_CREATE_RULESET, _LANDLOCK_RESTRICT_SELF = 444, 446
_LANDLOCK_VERSION = 1
# Numbers of bits for rights, by the first ABI that knows them. The rights are to files, to TCP
# (bind, connect), and to abstract Unix sockets and signals of other processes.
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16, 9: 17}
_TCP_RIGHTS = {4: 2}
_SCOPES = {6: 2}


class Layer(IntFlag):
    LANDLOCK = 1
    SECCOMP = 2


_WITHOUT = {
    Layer.LANDLOCK: "seccomp alone keeps them from files, networks and other processes",
    Layer.SECCOMP: "Landlock keeps them from files, but not from every socket and process",
    Layer.LANDLOCK | Layer.SECCOMP: "one that is taken over can do all that this user can",
}


def confine() -> Layer:
    """Confines this process, which must have a single thread. Returns the layers that the kernel
    lacks."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)  # neither layer works without it
    missing = Layer(0)
    if not _restrict_by_landlock(libc):
        missing |= Layer.LANDLOCK
    if not _filter_system_calls(libc):
        missing |= Layer.SECCOMP
    return missing


def log_gaps() -> None:
    """Confines a fork of this process, and logs a warning if the kernel lacks a layer."""
    pid = os.fork()
    if not pid:
        missing = Layer.LANDLOCK | Layer.SECCOMP
        try:
            missing = confine()
        finally:
            os._exit(missing)
    _, wait_status = os.waitpid(pid, 0)
    if missing := Layer(os.waitstatus_to_exitcode(wait_status)):
        names = " and ".join(str(each.name).lower() for each in Layer if each in missing)
        log.warning(
            "grammar processes are not fully confined", missing=names, meaning=_WITHOUT[missing]
        )


def landlock_abi() -> int:
    """The kernel's Landlock ABI. Less than 1: not built, not enabled, or not allowed in this
    container."""
    query, none = _LANDLOCK_CREATE_RULESET, ctypes.c_size_t(0)
    return int(ctypes.CDLL(None).syscall(query, None, none, _LANDLOCK_VERSION))


def _restrict_by_landlock(libc: ctypes.CDLL) -> bool:
    abi = landlock_abi()
    if abi < 1:
        return False
    rights = struct.pack("3Q", *(_bits(each, abi) for each in (_FILE_RIGHTS, _TCP_RIGHTS, _SCOPES)))
    ruleset = libc.syscall(_LANDLOCK_CREATE_RULESET, rights, ctypes.c_size_t(len(rights)), 0)
    if ruleset < 0:
        return False
    restricted: int = libc.syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
    return restricted == 0


def _bits(rights: dict[int, int], abi: int) -> int:
    return (1 << max((count for since, count in rights.items() if since <= abi), default=0)) - 1


def _filter_system_calls(libc: ctypes.CDLL) -> bool:
    found = _ARCHITECTURES.get(os.uname().machine)
    if found is None:
        return False
    program = _program(*found)
    code = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("HP", len(program) // 8, ctypes.addressof(code))
    return bool(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, described, 0, 0) == 0)


def _program(architecture: int, column: int) -> bytes:
    """The instructions of the filter. Jumps count the instructions that they skip."""
    only = {  # arguments that must have these values
        "sendto": {4: 0},  # no address
        "getpriority": {0: 0, 1: 0},  # its own
        "setpriority": {0: 0, 1: 0},
        "tgkill": {0: os.getpid()},
    }
    code = [
        _instruction(_LOAD, _ARCHITECTURE_AT),
        *_require(architecture),
        _instruction(_LOAD, _NUMBER_AT),
    ]
    for name, numbers in _ALLOWED.items():
        checks = []
        for index, value in only.get(name, {}).items():
            for half in (0, 1):  # of little-endian arguments
                checks.append(_instruction(_LOAD, _ARGUMENTS_AT + 8 * index + 4 * half))
                checks += _require(value >> 32 * half & 0xFFFFFFFF)
        code.append(_instruction(_JUMP_IF_EQUAL, numbers[column], 0, len(checks) + 1))
        code += [*checks, _instruction(_RETURN, _ALLOW)]
    return b"".join([*code, _instruction(_RETURN, _DENY)])


def _require(value: int) -> list[bytes]:
    return [_instruction(_JUMP_IF_EQUAL, value, 1, 0), _instruction(_RETURN, _DENY)]


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)
