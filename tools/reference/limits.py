"""The page of limits on requests, clients and processes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pkgutil import resolve_name
from typing import NamedTuple

from pydantic import TypeAdapter

from frontend.callers.tenants import Tenant
from tools.reference import markdown
from tools.reference.markdown import code, described, number, prose, table
from tools.reference.settings import allowed, default_of

_INVALID, _FULL = "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_COLUMNS = "Limit", "Value", "Beyond it"


class Limit(NamedTuple):
    """A limit.

    Args:
        value: where the code has it: `module:NAME`, or the name of a setting.
        unit: `bytes` is written in larger units.
    """

    what: str
    value: str
    unit: str = ""
    beyond: str = _INVALID


_VALIDATION = "frontend.validation"
_CHAT = "frontend.text.conversation"
_GRAMMAR = "scheduler_svc.grammar"
_REQUEST = (
    Limit("size of a message", "max_message_bytes", "bytes", _FULL),
    Limit("time in which a message arrives", "shared.rpc.reading:MAX_READ_S", "s", _FULL),
    Limit("metadata of a call", "shared.rpc.server:_MAX_METADATA_BYTES", "bytes", _FULL),
    Limit("`request_id`", f"{_VALIDATION}:MAX_REQUEST_ID_LENGTH", "characters"),
    Limit("`cache_salt`", f"{_VALIDATION}:MAX_CACHE_SALT_LENGTH", "characters"),
    Limit("`engine`", f"{_VALIDATION}:MAX_ENGINE_LENGTH", "characters"),
    Limit("prompt and completion together", "max_model_len", "tokens"),
    Limit("text of `Tokenize`, ids of `Detokenize`", f"{_VALIDATION}:MAX_TOKENIZED", "tokens"),
    Limit("messages, tools and tool calls of a chat", f"{_VALIDATION}:MAX_CHAT_PARTS"),
    Limit("JSON text in a chat", f"{_CHAT}:MAX_JSON_BYTES", "bytes"),
    Limit("nesting of JSON in a chat", f"{_CHAT}:MAX_JSON_DEPTH", "levels"),
    Limit("`chat_template_kwargs`", f"{_CHAT}:MAX_KWARGS_BYTES", "bytes"),
    Limit("tools and arguments of a chat", f"{_CHAT}:MAX_CHAT_JSON_BYTES", "characters"),
    Limit(
        "`n` · `max_tokens` · (1 + `logprobs`), if `n` is above 1",
        "frontend.sampling_checks:MAX_LOGPROB_ENTRIES",
    ),
    Limit("`beam_width` · `max_tokens`", "scheduler_svc.core.admission:MAX_BEAM_TOKENS", "tokens"),
    Limit("candidates of a beam", "scheduler_svc.core.admission:_MAX_LOGPROBS", "tokens"),
)
_STRUCTURED = (
    Limit("text of a constraint", "frontend.text.structured_output:MAX_GRAMMAR_BYTES", "bytes"),
    Limit("options of a `choice`", "frontend.text.structured_output:MAX_CHOICES"),
    Limit("nesting of a JSON schema", f"{_GRAMMAR}.schema.reader:MAX_DEPTH", "levels"),
    Limit("processor time of a compilation", f"{_GRAMMAR}.wire:COMPILE_CPU_S", "s"),
    Limit("processor time of a token's mask", f"{_GRAMMAR}.wire:MASK_CPU_S", "s"),
    Limit("memory of a grammar's process", f"{_GRAMMAR}.wire:MEMORY_BYTES", "bytes"),
    Limit("wait for other grammars", f"{_GRAMMAR}.grammars:_WAIT_S", "s", _FULL),
    Limit("grammars in use", f"{_GRAMMAR}.grammars:_MAX_PROCESSES", "", "waits"),
    Limit("memory of all grammars", f"{_GRAMMAR}.grammars:_MAX_BYTES", "bytes", "waits"),
    Limit("compilations at a time", f"{_GRAMMAR}.grammars:_MAX_COMPILING", "", "waits"),
    Limit(
        "time for which a grammar that killed its process is rejected",
        f"{_GRAMMAR}.grammars:_GUILTY_S",
        "s",
        "compiled again",
    ),
)
_CLIENT = (
    Limit("calls in progress, per frontend", "max_requests_per_client", "", _FULL),
    Limit("health watches of a host", "shared.rpc.health:MAX_WATCHERS_PER_HOST", "", _FULL),
)
_SERVER = "shared.rpc.server"
_PROCESS = (
    Limit("waiting requests of an engine", "max_waiting", "", _FULL),
    Limit(
        "waiting tokens of an engine, or 256 for each of `max_waiting` if that is more",
        "scheduler_svc.settings:MAX_WAITING_TOKENS",
        "",
        _FULL,
    ),
    Limit(
        "wait of a new request for a lost engine, from the loss",
        "frontend.engines.engine:_RECOVERY_S",
        "s",
        "UNAVAILABLE",
    ),
    Limit("wait of an older request", "frontend.engines.engine:_RESUME_S", "s", "UNAVAILABLE"),
    Limit("connections", f"{_SERVER}:MAX_CONNECTIONS", "", "closed"),
    Limit("open calls, but for health", "shared.rpc.open_calls:MAX_CALLS", "", _FULL),
    Limit("open calls of a connection", f"{_SERVER}:_CALLS_PER_CONNECTION", "", "waits"),
    Limit("handshake of a connection", f"{_SERVER}:HANDSHAKE_S", "s", "closed"),
    Limit("connection without calls", f"{_SERVER}:_IDLE_S", "s", "closed"),
    Limit("unread bytes of a connection", f"{_SERVER}:_UNREAD_BYTES", "bytes", "waits"),
    Limit("health watches", "shared.rpc.health:MAX_WATCHERS", "", _FULL),
    Limit("watches of a prefix cache", "scheduler_svc.block_watch:MAX_WATCHES", "", _FULL),
    Limit("unread events of such a watch", "scheduler_svc.block_watch:MAX_UNREAD", "", "DATA_LOSS"),
    Limit(
        "kinds of audit lines per second",
        "frontend.callers.audit:MAX_KINDS",
        "",
        "counted as one kind",
    ),
)
_STORE = "frontend.http.background.store"
_HTTP = (
    Limit("size of a body", "max_message_bytes", "bytes", "413"),
    Limit("line and headers of a request", "frontend.http.app:MAX_HEAD_BYTES", "bytes", "431"),
    Limit("time in which they arrive", "frontend.http.server:_HEAD_S", "s", "closed"),
    Limit("connection without requests", "frontend.http.server:_IDLE_S", "s", "closed"),
    Limit("prompts of a completion", "frontend.http.completions:MAX_PROMPTS", "", "400"),
    Limit("stored responses", f"{_STORE}:MAX_RESPONSES", "", "503"),
    Limit("stored responses", f"{_STORE}:MAX_RESPONSES_BYTES", "bytes", "503"),
    Limit("age of a stored response", f"{_STORE}:MAX_AGE_S", "s", "deleted"),
    Limit("handshake of a connection", f"{_SERVER}:HANDSHAKE_S", "s", "closed"),
    Limit("connections", f"{_SERVER}:MAX_CONNECTIONS", "", "closed"),
)
_DASHBOARD = (
    Limit("connections", "deploy.dashboard.__main__:_MAX_CONNECTIONS", "", "503"),
    Limit("open pages", "deploy.dashboard.app:_MAX_PAGES", "", "503"),
    Limit("chat answers at a time", "deploy.dashboard.app:_MAX_ANSWERS", "", "503"),
    Limit("size of a body", "deploy.dashboard.app:_MAX_BODY_BYTES", "bytes", "413"),
    Limit("time in which a body arrives", "deploy.dashboard.app:_BODY_S", "s", "408"),
)


def page() -> str:
    return markdown.page(
        "Limits",
        "This page lists the limits on requests, clients and processes, with the status that a "
        "client gets beyond each.",
        "Limits of sampling parameters are in [sampling parameters](sampling.md). Names in the "
        'column "Value" are [settings](settings.md), with their defaults.',
        "## Requests",
        _table(_REQUEST),
        f"gRPC itself rejects a message that is too large with {code(_FULL)}, without `RetryInfo`.",
        "## Structured output",
        _table(_STRUCTURED),
        "## Clients",
        "A client is a name in the tokens file. Without tokens, a client is an IPv4 address, an "
        "IPv6 network of 64 bits, all of loopback, or all Unix sockets.",
        _table(_CLIENT),
        "### Limits of one client",
        "A line of the file that `auth_tokens_file` names sets limits of one client, such as "
        "`TOKEN name=acme weight=2 max_requests=64`.",
        described(("Key", "Values", "Default", "Meaning"), _tenant()),
        "## Processes",
        _table(_PROCESS),
        "## HTTP",
        _table(_HTTP),
        "## Dashboard",
        _table(_DASHBOARD),
    )


def _table(limits: Iterable[Limit]) -> str:
    return table(_COLUMNS, [(each.what, _value(each), _beyond(each.beyond)) for each in limits])


def _value(limit: Limit) -> str:
    if ":" in limit.value:
        return _shown(resolve_name(limit.value), limit.unit)
    value = default_of(limit.value)
    return f"{code(limit.value)}, {_shown(value, limit.unit) if value != 'auto' else code(value)}"


def _shown(value: float, unit: str) -> str:
    if unit == "bytes":
        for size, name in _UNITS:
            if value >= size:
                return f"{number(value / size)} {name}"
    return f"{number(value)} {unit}".strip()


def _beyond(text: str) -> str:
    return code(text) if re.fullmatch("[A-Z_]+", text) else text


def _tenant() -> Iterator[tuple[str, ...]]:
    for name, schema in TypeAdapter(Tenant).json_schema()["properties"].items():
        default = schema.get("default")
        shown = "..".join(map(str, default)) if isinstance(default, list | tuple) else default
        known = "none" if shown in (None, 0) else code(shown)
        yield code(name), allowed(schema), known, prose(schema["description"])
