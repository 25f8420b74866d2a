"""Who may call over HTTP: tokens, limits of clients, and certificates."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest

from deploy.ports import free_port
from frontend.service import Frontend
from frontend.settings import FrontendSettings
from shared.process.ports import SharedListener, held_ports
from tests.certificates import Authority, Issued
from tests.frontend.conftest import bearer, rejection
from tests.frontend.fake_scheduler import FakeScheduler
from tests.frontend.http.conftest import POSTS, HttpService, Json, token_request

ACME, WEB, NEW = "acme-token-0123456789", "web-token-01234567890", "new-token-0123456789a"
PATH, ANTHROPIC = "/v1/completions", "/v1/messages"
AS_ACME = {"Authorization": f"Bearer {ACME}"}


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text(f"{ACME} name=acme max_requests=2 priorities=-5..10\n{WEB} name=web\n")
    return path


@pytest.fixture
def settings(request: Any, settings: FrontendSettings) -> FrontendSettings:
    if "tokens" not in request.fixturenames:
        return settings
    path: Path = request.getfixturevalue("tokens")
    return settings.model_copy(update={"auth_tokens_file": str(path)})


async def replace(path: Path, text: str) -> None:
    """Replaces a file as an operator would, by renaming."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ACME},
        {"Authorization": "Basic " + ACME},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer"},
        {"x-api-key": "wrong"},
        {"x-api-key": f"Bearer {ACME}"},
        {"Authorization": "Bearer wrong", "x-api-key": ACME},
    ],
)
async def test_without_a_token_nothing_is_served(
    tokens: Path, service: HttpService, headers: dict[str, str]
) -> None:
    for path, body in POSTS.items():
        response = await service.http.post(path, json=body, headers=headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["type"] == "authentication_error"
        assert ACME not in response.text
    assert (await service.http.get("/v1/models", headers=headers)).status_code == 401
    assert (await service.http.get("/health", headers=headers)).status_code == 200
    assert service.scheduler.submits.empty()


@pytest.mark.parametrize(
    "headers", [AS_ACME, {"authorization": f"bearer  {ACME}"}, {"x-api-key": ACME}]
)
async def test_a_token_names_the_client(
    tokens: Path, service: HttpService, headers: dict[str, str]
) -> None:
    for path, body in POSTS.items():
        await service.post(path, {**body, "cache_salt": "s"}, **headers)
        submit = service.scheduler.submits.get_nowait()
        assert submit.client.name == "acme"
        assert submit.cache_salt == "acme:s"


async def test_a_client_has_its_priorities(tokens: Path, service: HttpService) -> None:
    await service.post(PATH, {**POSTS[PATH], "priority": -5}, **AS_ACME)
    status, body = await service.error(PATH, {**POSTS[PATH], "priority": 11}, **AS_ACME)
    assert (status, body["error"]["param"]) == (400, "priority")


async def test_tokens_rotate_from_the_next_request_on(tokens: Path, service: HttpService) -> None:
    body = POSTS[PATH]
    await service.post(PATH, body, **AS_ACME)
    await replace(tokens, f"{NEW} name=acme\n")
    assert (await service.error(PATH, body, **AS_ACME))[0] == 401
    await service.post(PATH, body, **{"x-api-key": NEW})
    await replace(tokens, "broken\n")  # changes nothing
    await service.post(PATH, body, **{"x-api-key": NEW})
    await replace(tokens, "")
    assert (await service.error(PATH, body, **{"x-api-key": NEW}))[0] == 401


async def test_a_clients_calls_over_http_and_grpc_count_together(
    tokens: Path, service: HttpService
) -> None:
    body = POSTS[PATH]
    async with service.opened(PATH, body, **AS_ACME) as lines:
        await service.step()
        assert await lines.next()
        call = service.stub.GenerateStream(
            token_request(max_tokens=9), metadata=bearer(ACME), wait_for_ready=True
        )
        await service.scheduler.submits.get()
        for path in (PATH, ANTHROPIC):
            response = await service.http.post(path, json=POSTS[path], headers=AS_ACME)
            assert response.status_code == 429
            assert response.headers["retry-after"] == "1"
            error = response.json()["error"]
            assert error["type"] == "rate_limit_error"
            assert error["message"].startswith("max_requests: 2 requests")
        code, _ = await rejection(service.stub.Generate(token_request(), metadata=bearer(ACME)))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        service.scheduler.automatic = True
        await service.post(PATH, body, **{"x-api-key": WEB})  # has places of its own
        assert await lines.rest()
        call.cancel()
    while (await service.http.post(PATH, json=body, headers=AS_ACME)).status_code == 429:
        pass  # until the cancellation has arrived
    await service.post(PATH, body, **AS_ACME)


@pytest.mark.parametrize("changes", [{"max_requests_per_client": 1}])
async def test_without_tokens_a_host_is_a_client(service: HttpService) -> None:
    async with service.opened(PATH, POSTS[PATH]):
        status, body = await service.error(PATH, POSTS[PATH])
        assert status == 429
        assert body["error"]["message"].startswith("max_requests_per_client: 1 ")
        code, _ = await rejection(service.stub.Generate(token_request()))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await service.http.get("/health")).status_code == 200


async def test_with_tokens_a_page_of_any_name_may_call(tokens: Path, service: HttpService) -> None:
    await service.post(PATH, POSTS[PATH], **AS_ACME, Host="api.example")
    foreign = {"Origin": "http://api.example", "Host": "api.example"}
    assert (await service.error(PATH, POSTS[PATH], **AS_ACME, **foreign))[0] == 403


@pytest.fixture
def issued(authority: Authority) -> Issued:
    return authority.issue("server", "IP:127.0.0.1", "DNS:localhost")


@pytest.fixture
async def secure(
    settings: FrontendSettings, scheduler: FakeScheduler, issued: Issued, changes: Json
) -> AsyncIterator[int]:
    """The HTTPS port of a frontend."""
    files = {"tls_cert": issued.cert, "tls_key": issued.key, "http_port": free_port()}
    settings = settings.model_copy(update={**files, **changes})
    ready = asyncio.Event()
    frontend = Frontend(settings, ready=ready.set)
    listener = SharedListener(f"127.0.0.1:{settings.http_port}")
    with held_ports([], listener=listener):
        serving = asyncio.create_task(frontend.serve(listener))
        await ready.wait()
        yield settings.http_port
        frontend.server.stop()
        await serving


def client(port: int, ca: str, own: Issued | None = None) -> httpx2.AsyncClient:
    context = ssl.create_default_context(cafile=ca)
    if own:
        context.load_cert_chain(own.cert, own.key)
    return httpx2.AsyncClient(base_url=f"https://127.0.0.1:{port}", verify=context, timeout=20)


async def test_a_replaced_certificate_is_served_to_new_connections(
    secure: int, issued: Issued, authority: Authority, certificates: Path
) -> None:
    other = Authority(certificates, "others")
    async with client(secure, authority.ca) as before, client(secure, other.ca) as after:
        assert (await before.get("/health")).status_code == 200
        with pytest.raises(httpx2.ConnectError):
            await after.get("/health")
        issued.replace_by(other.issue("server", "IP:127.0.0.1"))
        assert (await after.get("/health")).status_code == 200
        # On the connection that it has.
        assert (await before.post(PATH, json=POSTS[PATH])).status_code == 200
        async with client(secure, authority.ca) as late:
            with pytest.raises(httpx2.ConnectError):
                await late.get("/health")
        await replace(Path(issued.key), "broken")
        async with client(secure, other.ca) as again:
            assert (await again.get("/health")).status_code == 200


async def test_plain_http_is_not_served_on_a_secure_port(secure: int) -> None:
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{secure}") as plain:
        with pytest.raises(httpx2.TransportError):
            await plain.get("/health")


@pytest.fixture
def client_ca(certificates: Path) -> Authority:
    return Authority(certificates, "clients")


async def test_clients_must_have_a_certificate_if_the_setting_asks_for_it(
    settings: FrontendSettings,
    scheduler: FakeScheduler,
    issued: Issued,
    authority: Authority,
    client_ca: Authority,
) -> None:
    mine, foreign = client_ca.issue("me", "DNS:me"), authority.issue("me", "DNS:me")
    changes = {"tls_client_ca": client_ca.ca}
    async for port in secure.__wrapped__(settings, scheduler, issued, changes):  # type: ignore[attr-defined]
        async with client(port, authority.ca, mine) as good:
            assert (await good.post(PATH, json=POSTS[PATH])).status_code == 200
        for own in (None, foreign):
            async with client(port, authority.ca, own) as bad:
                with pytest.raises(httpx2.TransportError):
                    await bad.get("/health")
