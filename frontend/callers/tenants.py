"""The tokens file: the clients that may call, their names and their limits.

    # a token, then its client's settings, in any order; only the token is required
    k3J9...  name=acme weight=2 max_requests=64 priorities=0..10
    x71M...  name=acme
    Qp0v...  name=web input_tokens_per_minute=200000 output_tokens_per_minute=50000 cache=shared

Tokens with one name belong to one client. A token can thus be replaced while the old one works.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import structlog
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic.dataclasses import dataclass

from nano_vllm_grpc.tls import FileError, stamp_of

log = structlog.get_logger(__name__)

_TOKEN = re.compile("[!-~]{16,}")
_NAME = re.compile("[A-Za-z0-9._-]{1,64}")
_MAX_PRIORITY = (1 << 31) - 1
_PerMinute = Annotated[int, Field(ge=1, lt=1 << 32)] | Literal[0]  # the default; no text equals it
_Priority = Annotated[int, Field(ge=-_MAX_PRIORITY - 1, le=_MAX_PRIORITY)]


def _split_range(value: object) -> object:
    """Splits `0..10`."""
    return tuple(value.split("..")) if isinstance(value, str) else value


def _check_order(priorities: tuple[int, int]) -> tuple[int, int]:
    if priorities[0] > priorities[1]:
        raise ValueError("must begin with the smaller number, as in 0..10")
    return priorities


@dataclass(frozen=True, slots=True)
class Tenant:
    """A client that has a name, and its limits. None and 0 mean no limit of its own."""

    name: str = Field(description="name of the client, which several tokens may share")
    weight: Annotated[float, Field(ge=0.001, le=1000, allow_inf_nan=False)] = Field(
        default=1.0, description="share of the engine, relative to the shares of other clients"
    )
    max_requests: Annotated[int, Field(ge=1, le=1 << 20)] | None = Field(
        default=None, description="maximum number of calls in progress, per frontend"
    )
    input_tokens_per_minute: _PerMinute = Field(
        default=0,
        description="maximum number of prompt tokens per minute, of all engines",
    )
    output_tokens_per_minute: _PerMinute = Field(
        default=0,
        description="maximum number of generated tokens per minute, of all engines",
    )
    priorities: Annotated[
        tuple[_Priority, _Priority], BeforeValidator(_split_range), AfterValidator(_check_order)
    ] = Field(default=(0, _MAX_PRIORITY), description="first and last priority of its requests")
    cache: Literal["own", "shared"] = Field(
        default="own",
        description="shared: requests without a salt share cached prefixes with all clients",
    )


_KEYS = tuple(field.name for field in fields(Tenant))


def engine_salt(client: Tenant | None, salt: str) -> str:
    """The cache salt that the engine gets for a request with `salt`. A client that does not share
    its cache has salts that no other client has, because no name has a colon."""
    if client is None or client.cache == "shared":
        return salt and f":{salt}"
    return f"{client.name}:{salt}"


def read_clients(path: str) -> dict[str, Tenant]:
    """Reads the tokens file. Returns each token's client, in the order of the file. Empty lines and
    lines that begin with `#` are ignored.

    Raises:
        FileError: the file cannot be read, or a line is wrong; the message names the line's number
            and the key, never the token.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"auth_tokens_file: cannot read {path}: {error}") from error
    names: dict[str, str] = {}  # by token
    known: dict[str, dict[str, Any]] = {}  # the settings in the lines, by name
    for number, line in enumerate(map(str.strip, lines), start=1):
        if not line or line.startswith("#"):
            continue
        try:
            token, words = _read_line(line)
            client = Tenant(**words)
            if names.setdefault(token, client.name) != client.name:
                raise ValueError("the token also belongs to another client")
            for key in words:
                value = getattr(client, key)
                if known.setdefault(client.name, {}).setdefault(key, value) != value:
                    raise ValueError(f"{key}: differs from an earlier line with this name")
        except ValueError as error:
            message = f"auth_tokens_file: line {number} of {path}: {_reason(error)}"
            raise FileError(message) from None  # the cause quotes the line
    clients = {name: Tenant(**values) for name, values in known.items()}
    return {token: clients[name] for token, name in names.items()}


class Tokens:
    """The tokens of a file that may change.

    An empty file locks all clients out. If the file is deleted or broken, nothing changes.

    Raises:
        FileError: the file cannot be used, or contains no token.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._stamp = stamp_of(path)
        self._clients = _by_digest(path)
        if not self._clients:
            raise FileError(f"auth_tokens_file: {path} contains no token")

    def named(self, name: str) -> Tenant | None:
        """The client of that name, if the file has one."""
        self._reread()
        return next((each for each in self._clients.values() if each.name == name), None)

    def find(self, token: str) -> Tenant | None:
        """The client whose token this is, or None if it is unknown."""
        self._reread()
        # The time of the look-up reveals only digests, whose prefixes no caller can choose.
        return self._clients.get(_digest(token))

    def _reread(self) -> None:
        stamp = stamp_of(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._clients = _by_digest(self._path)
        except FileError as error:
            log.warning("tokens file cannot be used; keeping the current tokens", reason=str(error))
        else:
            log.info("tokens reloaded", tokens=len(self._clients))


def _by_digest(path: str) -> dict[bytes, Tenant]:
    return {_digest(token): client for token, client in read_clients(path).items()}


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _read_line(line: str) -> tuple[str, dict[str, Any]]:
    """Splits a line into its token and the client's settings. Makes up a name if there is none."""
    token, *words = line.split()
    if not _TOKEN.fullmatch(token):
        raise ValueError("must begin with a token, at least 16 printable ASCII characters")
    found: dict[str, str] = {}
    for place, word in enumerate(words, start=1):
        key, equals, value = word.partition("=")
        if not equals or key not in _KEYS:
            # The word may be a part of a token, so the message has only its place.
            raise ValueError(f"word {place} after the token must be one of {', '.join(_KEYS)}=...")
        if key in found:
            raise ValueError(f"{key}: appears twice")
        found[key] = value
    name = found.setdefault("name", hashlib.sha256(token.encode()).hexdigest()[:8])
    if not _NAME.fullmatch(name):
        raise ValueError("name: must be 1 to 64 letters, digits, '.', '_' or '-'")
    return token, found


def _reason(error: ValueError) -> str:
    """The reason, without a value, which may be a part of a token."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_input=False, include_url=False)[0]
    return f"{first['loc'][0]}: {first['msg']}"
