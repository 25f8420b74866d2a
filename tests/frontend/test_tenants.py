"""The tokens file and its limits, over real gRPC with a fake scheduler."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio

from frontend.callers.tenants import Tenant, engine_salt, read_clients
from frontend.settings import FrontendSettings
from nano_vllm_grpc.pb import frontend_pb2 as pb
from nano_vllm_grpc.pb.frontend_pb2_grpc import InferenceServiceStub
from nano_vllm_grpc.tls import FileError
from shared.pb import scheduler_pb2
from tests.echo_server import echo_server
from tests.frontend.conftest import Service, bearer, rejection
from tests.frontend.fake_scheduler import FakeScheduler

ACME, WEB, BARE = "acme-token-0123456789", "web-token-01234567890", "bare-token-0123456789"
NEW_ACME = "acme-token-new-0123456789"
FILE = f"""
# a client of each kind
{ACME}  name=acme weight=2.5 max_requests=1 priorities=-5..10
{NEW_ACME} name=acme
  {WEB} input_tokens_per_minute=200000 output_tokens_per_minute=50000 name=web cache=shared
{BARE}
"""
TIMEOUT_S = 60


@pytest.fixture
def tokens_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(FILE)
    return path


@pytest.fixture
def settings(scheduler: FakeScheduler, settings: FrontendSettings, tokens_file: Path) -> Any:
    return settings.model_copy(update={"auth_tokens_file": str(tokens_file)})


def request(**fields: Any) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(max_tokens=3, ignore_eos=True)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6, 7]), sampling=sampling, **fields)


async def test_the_file_has_the_limits_of_clients(tokens_file: Path) -> None:
    clients = read_clients(str(tokens_file))
    assert list(clients) == [ACME, NEW_ACME, WEB, BARE]
    assert clients[ACME] == clients[NEW_ACME]
    assert clients[ACME] == Tenant("acme", weight=2.5, max_requests=1, priorities=(-5, 10))
    assert clients[WEB] == Tenant(
        "web",
        input_tokens_per_minute=200_000,
        output_tokens_per_minute=50_000,
        cache="shared",
    )
    assert clients[BARE] == Tenant("99734074")  # of its SHA-256
    assert clients[BARE].priorities == (0, 2**31 - 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("weight", "word 1 after the token must be one of name, weight"),
        ("name=a secret=b", "word 2 after the token must be one of name, weight"),
        ("name=a name=a", "name: appears twice"),
        ("name=a:b", "name: must be 1 to 64 letters"),
        (f"name={'x' * 65}", "name: must be 1 to 64 letters"),
        ("weight=0", "weight: .* greater than or equal to 0.001"),
        ("weight=nan", "weight: .* finite"),
        ("max_requests=0", "max_requests: .* greater than or equal to 1"),
        ("input_tokens_per_minute=0", "input_tokens_per_minute: .* greater than or equal to 1"),
        (
            "output_tokens_per_minute=9999999999",
            "output_tokens_per_minute: .* less than 4294967296",
        ),
        ("priorities=5", "priorities: "),
        ("priorities=1..0", "priorities: .* begin with the smaller number"),
        ("priorities=0..2147483648", "priorities: .* less than or equal to 2147483647"),
        ("cache=none", "cache: .* 'own' or 'shared'"),
        ("name=acme weight=3", "weight: differs from an earlier line with this name"),
        ("name=acme priorities=0..10", "priorities: differs from an earlier line"),
    ],
)
def test_a_wrong_line_is_named_by_number_and_key(tmp_path: Path, words: str, message: str) -> None:
    assert_wrong_line(tmp_path, f"other-token-0123456789 {words}", message)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("short", ""),
        ("has a space in it, and is long", ""),
        ("überlanges-token-0123456789", ""),
        (f"{ACME} name=web", "the token also belongs to another client"),
    ],
)
def test_a_token_is_one_long_word_of_one_client(tmp_path: Path, line: str, message: str) -> None:
    assert_wrong_line(tmp_path, line, message)


def assert_wrong_line(tmp_path: Path, line: str, message: str) -> None:
    """The error says what is wrong with the line, but does not quote its token."""
    path = tmp_path / "tokens"
    path.write_text(f"{FILE}# of nobody else\n{line}\n")
    with pytest.raises(FileError, match=rf"auth_tokens_file: line 8 of .*: {message}") as raised:
        read_clients(str(path))
    shown = f"{raised.value} {raised.value.__cause__} {raised.value.__suppress_context__}"
    assert line.partition(" name=")[0] not in shown
    assert "token-0123456789" not in shown


async def test_limits_change_without_a_restart(tokens_file: Path) -> None:
    async with (
        echo_server(auth_tokens_file=tokens_file) as (address, _),
        aio.insecure_channel(address) as channel,
    ):
        stub = InferenceServiceStub(channel)

        def change(words: str) -> None:
            tokens_file.write_text(FILE.replace("max_requests=1", words))

        async def another(token: str = ACME) -> Any:
            call = stub.GenerateStream(pb.GenerateRequest(), metadata=bearer(token))
            assert (await call.read()).text == "open"
            return call

        calls = [await another()]
        with pytest.raises(aio.AioRpcError, match="max_requests: 1 requests are in progress"):
            await another()
        change("max_requests=2")
        calls.append(await another(NEW_ACME))  # another token with this name
        change("max_requests=none")  # not valid
        with pytest.raises(aio.AioRpcError, match="max_requests: 2 requests are in progress"):
            await another()
        change("")  # now the setting's 512
        calls.append(await another())


async def submitted(service: Service, token: str, **fields: Any) -> scheduler_pb2.Submit:
    await service.stub.Generate(request(**fields), metadata=bearer(token))
    return await asyncio.wait_for(service.scheduler.submits.get(), TIMEOUT_S)


async def test_the_engine_gets_the_client(service: Service) -> None:
    submit = await submitted(service, ACME, priority=-5, cache_salt="salt")
    assert submit.client == scheduler_pb2.Client(name="acme", weight=2.5)
    assert submit.cache_salt == "acme:salt"
    submit = await submitted(service, WEB)
    assert submit.client == scheduler_pb2.Client(
        name="web",
        weight=1.0,
        input_tokens_per_minute=200_000,
        output_tokens_per_minute=50_000,
    )
    assert submit.cache_salt == ""


@pytest.mark.parametrize(
    ("token", "priority", "allowed"),
    [
        (ACME, -6, "[-5, 10]"),
        (ACME, 11, "[-5, 10]"),
        (WEB, -1, "[0, 2147483647]"),
        (BARE, -(2**31), "[0, 2147483647]"),
    ],
)
async def test_a_priority_outside_the_clients_range_is_rejected(
    service: Service, token: str, priority: int, allowed: str
) -> None:
    call = service.stub.Generate(request(priority=priority), metadata=bearer(token))
    assert await rejection(call) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        f"priority: {priority}; must be in {allowed} for this client",
    )
    assert service.scheduler.submits.empty()


def test_no_salt_matches_another_clients_prefixes() -> None:
    acme, web = Tenant("acme"), Tenant("web", cache="shared")
    salts = ["", "acme", "acme:", ":", ":x", "x", "acme:x"]
    own = {engine_salt(acme, salt) for salt in salts}
    others = {engine_salt(client, salt) for client in (web, None) for salt in salts}
    assert len(own) == len(others) == len(salts)
    assert not own & others
    assert not own & {engine_salt(Tenant("acm"), salt) for salt in salts}
    assert engine_salt(web, "") == engine_salt(None, "") == ""
