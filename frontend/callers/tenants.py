"""The tokens file: the clients that may call, their names and their limits.

    # a token, then what is known of its client, in any order; only the token is needed
    k3J9...  name=acme weight=2 max_requests=64 max_bytes=8MiB priorities=0..10
    x71M...  name=acme
    Qp0v...  name=web input_tokens_per_minute=200000 output_tokens_per_minute=50000 cache=shared

Tokens of one name are one client's, so that one can be replaced by another while both work.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from nano_vllm_grpc.tls import FileError

log = structlog.get_logger(__name__)

_MIN_TOKEN_LENGTH = 16
_MAX_PRIORITY = (1 << 31) - 1
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_NAME_CHARACTERS = 64


@dataclass(frozen=True, slots=True)
class Client:
    """A client that has a name, and its limits; None and 0 are without a limit of its own."""

    name: str
    weight: float = 1.0  # its share of the engine, relative to other clients'
    max_requests: int | None = None  # in progress, per frontend
    max_bytes: int | None = None  # of messages being read or held, per frontend
    input_tokens_per_minute: int = 0
    output_tokens_per_minute: int = 0
    priorities: tuple[int, int] = (0, _MAX_PRIORITY)  # first and last that it may use
    shares_cache: bool = False  # with everybody, where requests have no salt


def engine_salt(client: Client | None, salt: str) -> str:
    """The cache salt for the engine of a request that has `salt`: clients that do not share their
    cache have all of theirs to themselves, since no name has a colon."""
    if client is None or client.shares_cache:
        return salt and f":{salt}"
    return f"{client.name}:{salt}"


def read_clients(path: str) -> dict[str, Client]:
    """Reads the tokens file: each token's client, in the order of the file. Empty lines and those
    that begin with `#` say nothing.

    Raises:
        FileError: the file cannot be read, or a line is wrong; the message names the line's number
            and the key, never the token.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"auth_tokens_file: cannot read {path}: {error}") from error
    names: dict[str, str] = {}  # by token
    facts: dict[str, dict[str, Any]] = {}  # by name
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or line.startswith("#"):
            continue
        try:
            token, known = _read_line(line)
            name = known["name"]
            if names.setdefault(token, name) != name:
                raise ValueError("the token is another client's, too")
            _merge(facts.setdefault(name, {}), known)
        except ValueError as error:
            message = f"auth_tokens_file: line {number} of {path}: {error}"
            raise FileError(message) from None  # the cause quotes the line
    clients = {name: Client(**known) for name, known in facts.items()}
    return {token: clients[name] for token, name in names.items()}


class Tokens:
    """The tokens of a file that may change.

    Emptying the file locks everybody out. If it is deleted or broken, nothing changes.

    Raises:
        FileError: the file cannot be used, or holds no token.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._stamp = self._read_stamp()
        self._clients = _by_digest(path)
        if not self._clients:
            raise FileError(f"auth_tokens_file: {path} holds no token")

    def named(self, name: str) -> Client | None:
        """The client of that name, if the file has one."""
        self._reread()
        return next((each for each in self._clients.values() if each.name == name), None)

    def find(self, token: str) -> Client | None:
        """The client whose token this is, or None if it is unknown."""
        self._reread()
        # The time taken reveals digests at most, whose prefixes no caller can choose.
        return self._clients.get(_digest(token))

    def _reread(self) -> None:
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._clients = _by_digest(self._path)
        except FileError as error:
            log.warning("tokens not reloaded", reason=str(error))
        else:
            log.info("tokens reloaded", tokens=len(self._clients))

    def _read_stamp(self) -> tuple[int, int, int] | None:
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino


def _by_digest(path: str) -> dict[bytes, Client]:
    return {_digest(token): client for token, client in read_clients(path).items()}


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _read_line(line: str) -> tuple[str, dict[str, Any]]:
    token, *words = line.split()
    if not re.fullmatch(f"[!-~]{{{_MIN_TOKEN_LENGTH},}}", token):
        raise ValueError(
            f"begins with no token: at least {_MIN_TOKEN_LENGTH} printable ASCII characters"
        )
    known: dict[str, Any] = {"name": hashlib.sha256(token.encode()).hexdigest()[:8]}
    seen: set[str] = set()
    for place, word in enumerate(words, start=1):
        key, equals, value = word.partition("=")
        if not equals or key not in _READERS:
            # It may be a part of a token: only its place is told.
            raise ValueError(f"word {place} after the token is none of {', '.join(_READERS)}=...")
        if key in seen:
            raise ValueError(f"{key}: given twice")
        seen.add(key)
        field, read = _READERS[key]
        try:
            known[field] = read(value)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None
    return token, known


def _merge(facts: dict[str, Any], more: Mapping[str, Any]) -> None:
    for field, value in more.items():
        if facts.setdefault(field, value) != value:
            key = next(key for key, (name, _) in _READERS.items() if name == field)
            raise ValueError(f"{key}: contradicts an earlier line of the same name")


def _name(value: str) -> str:
    if not re.fullmatch(f"[A-Za-z0-9._-]{{1,{_NAME_CHARACTERS}}}", value):
        raise ValueError(f"must be 1 to {_NAME_CHARACTERS} letters, digits, '.', '_' or '-'")
    return value


def _weight(value: str) -> float:
    if not re.fullmatch(r"\d{1,4}(\.\d{1,6})?", value) or not 0.001 <= float(value) <= 1000:
        raise ValueError("must be a number in [0.001, 1000]")
    return float(value)


def _count(high: int) -> Callable[[str], int]:
    def read(value: str) -> int:
        if not re.fullmatch(r"\d{1,10}", value) or not 1 <= int(value) <= high:
            raise ValueError(f"must be a whole number in [1, {high}]")
        return int(value)

    return read


def _bytes(value: str) -> int:
    match = re.fullmatch(r"(\d{1,12})(|KiB|MiB|GiB)", value)
    if not match or not int(match[1]):
        raise ValueError("must be a whole number of bytes, KiB, MiB or GiB above 0, as 8MiB")
    return int(match[1]) * _UNITS[match[2]]


def _priorities(value: str) -> tuple[int, int]:
    match = re.fullmatch(r"(-?\d{1,10})\.\.(-?\d{1,10})", value)
    low, high = (int(match[1]), int(match[2])) if match else (1, 0)
    if not -_MAX_PRIORITY - 1 <= low <= high <= _MAX_PRIORITY:
        raise ValueError("must be two int32, the smaller one first, as 0..10")
    return low, high


def _cache(value: str) -> bool:
    if value not in ("own", "shared"):
        raise ValueError("must be own or shared")
    return value == "shared"


_READERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "name": ("name", _name),
    "weight": ("weight", _weight),
    "max_requests": ("max_requests", _count(1 << 20)),
    "max_bytes": ("max_bytes", _bytes),
    "input_tokens_per_minute": ("input_tokens_per_minute", _count((1 << 32) - 1)),
    "output_tokens_per_minute": ("output_tokens_per_minute", _count((1 << 32) - 1)),
    "priorities": ("priorities", _priorities),
    "cache": ("shares_cache", _cache),
}
