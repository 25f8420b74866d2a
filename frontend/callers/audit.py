"""The audit trail: logs and counts each request when it ends.

A line names the client and its peer, the method, the model, the numbers of tokens and the outcome.
It contains neither text nor the client's token. Calls that generate nothing, such as rejected
calls, may arrive by the thousand. The first call of a kind is logged at once. The others are logged
as one line per second with their count.
"""

from __future__ import annotations

import asyncio
import contextvars
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import structlog
from grpc import StatusCode, aio

from frontend.callers.call import CALL, Call, Work
from shared.errors import (
    InvalidArgumentError,
    QueueFullError,
    ServiceError,
    UnauthenticatedError,
)
from shared.rpc.callers import host_of

log = structlog.get_logger(__name__)

_INTERVAL_S = 1.0
# Kinds of lines per interval. All further lines count as one kind, without client and peer.
MAX_KINDS = 256
_OK, _CANCELLED = StatusCode.OK.name, StatusCode.CANCELLED.name


class Usage:
    """Counters by client name. All callers without a name count as the client ''."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, str]] = Counter()  # by client, method and outcome
        self.rejections: Counter[tuple[str, str]] = Counter()  # by client and reason
        self.prompt_tokens: Counter[str] = Counter()
        self.cached_prompt_tokens: Counter[str] = Counter()
        self.completion_tokens: Counter[str] = Counter()

    def add(self, call: Call, outcome: str, rejected_for: str, work: Work | None) -> None:
        """Counts a call that has ended.

        Args:
            outcome: how its completions ended, or its status if there are none.
            rejected_for: the limit or field it was rejected for; empty if it was not rejected.
        """
        client = call.client.name if call.client else ""
        self.requests[client, call.method, outcome] += 1
        if rejected_for:
            self.rejections[client, rejected_for] += 1
        if work is not None:
            self.prompt_tokens[client] += work.prompt_tokens
            self.cached_prompt_tokens[client] += work.cached_prompt_tokens
            self.completion_tokens[client] += work.completion_tokens


class _Kind(NamedTuple):
    client: str | None
    peer: str  # its host
    method: str
    outcome: str
    reason: str


class Audit:
    """Records calls. Use it on the event loop."""

    def __init__(self, usage: Usage) -> None:
        self.usage = usage
        self._counts: dict[_Kind, int] = {}  # of calls that are not logged yet
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def records(self, call: Call) -> Iterator[None]:
        """Makes `call` the current call, and records how it ends."""
        CALL.set(call)
        outcome, reason = StatusCode.INTERNAL.name, ""
        try:
            yield
            outcome = _OK
        except (asyncio.CancelledError, GeneratorExit, aio.InternalError):
            outcome = _CANCELLED  # aio.InternalError: the caller is gone
            raise
        except ServiceError as error:
            outcome, reason = error.code.name, _reason(error)
            raise
        finally:
            self._ended(call, outcome, reason)

    def _ended(self, call: Call, outcome: str, reason: str) -> None:
        work = call.work()
        if work is not None and not reason:
            outcome = work.finish_reasons or outcome
            _log_generation(call, work, outcome)
        else:
            name = call.client.name if call.client else None
            self._count(_Kind(name, host_of(call.peer), call.method, outcome, reason))
        self.usage.add(call, outcome, reason, None if reason else work)

    def _count(self, kind: _Kind) -> None:
        if kind not in self._counts and len(self._counts) >= MAX_KINDS:
            kind = kind._replace(client=None, peer="many", method="other")
        if kind in self._counts:
            self._counts[kind] += 1
            return
        self._counts[kind] = 0
        _log_kind(kind, 1)
        if self._timer is None:
            self._start_timer()

    def _start_timer(self) -> None:
        # In an empty context, so that the line does not have the fields of the current request.
        self._timer = asyncio.get_running_loop().call_later(
            _INTERVAL_S, self._flush, context=contextvars.Context()
        )

    def _flush(self) -> None:
        """Logs the counts. A kind that was counted is counted again, not logged at once."""
        counted = {kind: count for kind, count in self._counts.items() if count}
        for kind, count in counted.items():
            _log_kind(kind, count)
        self._counts = dict.fromkeys(counted, 0)
        self._timer = None
        if counted:
            self._start_timer()


def _reason(error: ServiceError) -> str:
    """The field or limit for which a call was rejected. Empty if the call was not rejected."""
    if isinstance(error, InvalidArgumentError):
        return re.split(r"[.\[]", error.field)[0]
    if isinstance(error, QueueFullError):
        return error.limit or error.code.name
    return error.code.name if isinstance(error, UnauthenticatedError) else ""


def _log_generation(call: Call, work: Work, outcome: str) -> None:
    log.info(
        "request ended",
        request_id=work.request_id,
        client=call.client.name if call.client else None,
        peer=call.peer,
        method=call.method,
        model=work.model,
        outcome=outcome,
        prompt_tokens=work.prompt_tokens,
        cached_prompt_tokens=work.cached_prompt_tokens,
        completion_tokens=work.completion_tokens,
        total_s=round(time.monotonic() - call.began_at, 4),
    )


def _log_kind(kind: _Kind, count: int) -> None:
    fields = kind._asdict()
    if not kind.reason:
        del fields["reason"]
    log.info("requests ended", **fields, count=count)
