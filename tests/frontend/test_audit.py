"""Each request is logged and counted with its client and outcome, without text or tokens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog

from frontend.callers.audit import MAX_KINDS, Audit, Usage
from frontend.callers.call import Call, Work
from frontend.callers.tenants import Tenant
from frontend.engines import engine
from frontend.settings import FrontendSettings
from nano_vllm_grpc.pb import frontend_pb2 as pb
from shared.errors import InvalidArgumentError, QueueFullError
from shared.pb import scheduler_pb2 as pb2
from tests.frontend.conftest import Service, bearer
from tests.frontend.fake_scheduler import CACHED_PROMPT_TOKENS
from tests.waiting import until

TOKEN, WRONG = "acme-token-0123456789", "wrong-token-0123456789"
MINE = bearer(TOKEN)
SPENT = "input_tokens_per_minute"
SECRET = "secretword"
Lines = list[MutableMapping[str, Any]]


@pytest.fixture
def settings(settings: FrontendSettings, tmp_path: Path) -> FrontendSettings:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{TOKEN} name=acme max_requests=1\n")
    return settings.model_copy(update={"auth_tokens_file": str(tokens)})


@pytest.fixture
def lines() -> Iterator[Lines]:
    with structlog.testing.capture_logs() as captured:
        yield captured


def request(**fields: Any) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(max_tokens=3, ignore_eos=True)
    return pb.GenerateRequest(text=SECRET, sampling=sampling, **fields)


async def ended(call: Any, lines: Lines) -> MutableMapping[str, Any]:
    """The line of a call that ends, without what lines keep back."""
    await call.code()
    await until(lambda: any("method" in line for line in lines), "its line")
    for kept_back in (SECRET, TOKEN, WRONG):
        assert kept_back not in str(lines)
    line = next(line for line in lines if "method" in line)
    lines.clear()
    return line


async def outcome(call: Any, lines: Lines) -> tuple[Any, ...]:
    line = await ended(call, lines)
    return line["client"], line["method"], line["outcome"], line.get("reason")


async def test_a_request_is_recorded(service: Service, lines: Lines) -> None:
    line = await ended(service.stub.Generate(request(), metadata=MINE), lines)
    assert line.pop("peer").startswith("ipv4:127.0.0.1:")
    assert line.pop("request_id")
    assert line.pop("prompt_tokens") > 0
    expected = {
        **{"event": "request ended", "method": "Generate", "outcome": "LENGTH"},
        **{"client": "acme", "model": "demo", "completion_tokens": 3},
        "cached_prompt_tokens": CACHED_PROMPT_TOKENS,
    }
    assert expected.items() <= line.items()
    assert "reason" not in line


async def test_each_outcome_is_recorded(
    service: Service, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub, scheduler = service.stub, service.scheduler
    unreadable = service.channel.unary_unary("/nanovllm.v1.InferenceService/Generate")
    tokenize = stub.Tokenize(pb.TokenizeRequest(text=SECRET), metadata=MINE)
    assert await outcome(tokenize, lines) == ("acme", "Tokenize", "OK", None)
    call = stub.Generate(request(), metadata=bearer(WRONG))
    assert await outcome(call, lines) == (None, "Generate", "UNAUTHENTICATED", "UNAUTHENTICATED")
    call = stub.Generate(request(priority=-1), metadata=MINE)
    assert await outcome(call, lines) == ("acme", "Generate", "INVALID_ARGUMENT", "priority")
    call = unreadable(b"\xff", metadata=MINE)
    assert await outcome(call, lines) == ("acme", "Generate", "INVALID_ARGUMENT", "message")

    scheduler.automatic = False
    held = stub.GenerateStream(request(), metadata=MINE)
    await scheduler.submits.get()
    call = stub.GetModel(pb.GetModelRequest(), metadata=MINE)
    assert await outcome(call, lines) == ("acme", "GetModel", "RESOURCE_EXHAUSTED", "max_requests")
    held.cancel()
    assert await outcome(held, lines) == ("acme", "GenerateStream", "CANCELLED", None)

    monkeypatch.setattr(engine, "_RECOVERY_S", 0.0)
    await scheduler.stop()
    await service.wait_for_health(False)
    call = stub.Generate(request(), metadata=MINE)
    assert await outcome(call, lines) == ("acme", "Generate", "UNAVAILABLE", None)


@pytest.mark.parametrize(
    ("cause", "field", "status", "reason"),
    [
        (pb2.FINISH_CAUSE_QUEUE_FULL, "", "RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED"),
        (pb2.FINISH_CAUSE_QUEUE_FULL, SPENT, "RESOURCE_EXHAUSTED", SPENT),
        (pb2.FINISH_CAUSE_INVALID, "sampling.top_k", "INVALID_ARGUMENT", "sampling"),
        (pb2.FINISH_CAUSE_INTERNAL, "", "INTERNAL", None),
        (pb2.FINISH_CAUSE_DEADLINE, "", "DEADLINE_EXCEEDED", None),
    ],
)
async def test_a_rejection_by_the_scheduler_is_recorded(
    service: Service, lines: Lines, cause: Any, field: str, status: str, reason: str | None
) -> None:
    service.scheduler.rejection = pb2.Finished(cause=cause, message="a reason", field=field)
    call = service.stub.Generate(request(), metadata=MINE)
    assert await outcome(call, lines) == ("acme", "Generate", status, reason)


async def test_a_flood_of_rejections_is_one_line_a_second(service: Service, lines: Lines) -> None:
    calls = [service.stub.Generate(request()) for _ in range(300)]
    codes = [await call.code() for call in calls]
    assert set(codes) == {grpc.StatusCode.UNAUTHENTICATED}

    def rejected() -> Lines:
        return [line for line in lines if line.get("outcome") == "UNAUTHENTICATED"]

    await until(lambda: sum(line["count"] for line in rejected()) == 300, "their lines")
    assert rejected()[0]["count"] == 1  # at once
    assert len(rejected()) < 30
    assert {line["peer"] for line in rejected()} == {"ipv4:127.0.0.1"}


async def test_kinds_of_lines_are_bounded(lines: Lines) -> None:
    audit = Audit(Usage())
    for number in range(2 * MAX_KINDS):
        peer = f"ipv4:10.0.{number // 256}.{number % 256}:1234"
        with pytest.raises(InvalidArgumentError), audit.records(Call("Generate", peer)):
            raise InvalidArgumentError("chat.messages[7].role", "unknown")
    assert len(lines) == MAX_KINDS + 1
    assert lines[-1]["peer"] == "many"
    assert lines[-1]["reason"] == "chat"


async def test_usage_is_counted_by_client(lines: Lines) -> None:
    audit = Audit(usage := Usage())
    acme = Tenant("acme")
    for finish in ("EOS", "LENGTH", ""):
        call = Call("GenerateStream", "unix:", acme)
        call.works = [lambda finish=finish: Work("id", "demo", 10, 4, 7, finish)]
        with contextlib.suppress(asyncio.CancelledError), audit.records(call):
            if not finish:
                raise asyncio.CancelledError
    for _ in range(3):
        with pytest.raises(QueueFullError), audit.records(Call("Generate", "unix:", acme)):
            raise QueueFullError("max_requests: 1 requests are in progress", 1.0, "max_requests")
    with pytest.raises(ValueError, match="bug"), audit.records(Call("Generate", "unix:")):
        raise ValueError("bug")
    assert usage.prompt_tokens == {"acme": 30}
    assert usage.cached_prompt_tokens == {"acme": 12}
    assert usage.completion_tokens == {"acme": 21}
    assert usage.rejections == {("acme", "max_requests"): 3}
    assert usage.requests == {
        ("acme", "GenerateStream", "EOS"): 1,
        ("acme", "GenerateStream", "LENGTH"): 1,
        ("acme", "GenerateStream", "CANCELLED"): 1,
        ("acme", "Generate", "RESOURCE_EXHAUSTED"): 3,
        ("", "Generate", "INTERNAL"): 1,
    }
    assert [line["count"] for line in lines if "count" in line] == [1, 1]
