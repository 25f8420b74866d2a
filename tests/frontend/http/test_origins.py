"""Web pages: names of this server, DNS rebinding, origins and CORS."""

from __future__ import annotations

import pytest

from tests.frontend.http.conftest import POSTS, HttpService

PATH = "/v1/completions"
BODY = POSTS[PATH]
PAGE = "https://page.example"


async def status(service: HttpService, **headers: str) -> int:
    return (await service.http.post(PATH, json=BODY, headers=headers)).status_code


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "localhost:1", "LOCALHOST", "localhost.", "a.localhost", "127.0.0.1:8000"),
        *("10.1.2.3", "[::1]:8000", "[fe80::1]", "api.example", "api.example:8443"),
    ],
)
@pytest.mark.parametrize("changes", [{"http_hosts": ("api.example",)}])
async def test_names_of_this_server_pass(service: HttpService, host: str) -> None:
    assert await status(service, Host=host) == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "x"],
)
async def test_other_names_are_misdirected(service: HttpService, host: str) -> None:
    for path in ("/health", "/v1/models"):
        response = await service.http.get(path, headers={"Host": host})
        assert response.status_code == 421
        assert "http_hosts" in response.json()["error"]["message"]
    assert await status(service, Host=host) == 421
    assert await status(service, Host=host, Origin=f"http://{host}") == 421


@pytest.mark.parametrize("headers", [{"Host": "[evil"}, {"Origin": "http://[evil"}])
async def test_a_malformed_name_is_the_clients_error(
    service: HttpService, headers: dict[str, str]
) -> None:
    assert await status(service, **headers) in (400, 403, 421)


@pytest.mark.parametrize("changes", [{"http_hosts": ("API.example",)}])
async def test_names_have_no_capitals(service: HttpService) -> None:
    assert await status(service, Host="api.example") == 200


async def test_a_page_of_this_server_may_send_requests(service: HttpService) -> None:
    for host in ("localhost:8000", "127.0.0.1:8000", "[::1]:8000"):
        assert await status(service, Host=host, Origin=f"http://{host}") == 200
        assert await status(service, Host=host, Origin="http://localhost:8001") == 403


@pytest.mark.parametrize("origin", [PAGE, "null", "http://127.0.0.1", "file://"])
async def test_a_foreign_page_may_not(service: HttpService, origin: str) -> None:
    response = await service.http.post(PATH, json=BODY, headers={"Origin": origin})
    assert response.status_code == 403
    assert response.json()["error"]["type"] == "permission_error"
    assert not [name for name in response.headers if name.startswith("access-control")]
    assert service.scheduler.submits.empty()


def preflight(origin: str) -> dict[str, str]:
    return {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,x-request-id",
    }


async def test_no_preflight_is_answered_by_default(service: HttpService) -> None:
    response = await service.http.options(PATH, headers=preflight(PAGE))
    assert response.status_code == 403
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("changes", [{"http_origins": (PAGE,)}])
async def test_permitted_pages_may_send_requests(service: HttpService) -> None:
    answer = await service.http.options(PATH, headers=preflight(PAGE))
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert "authorization" in answer.headers["access-control-allow-headers"]
    response = await service.http.post(PATH, json=BODY, headers={"Origin": PAGE})
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == PAGE
    assert "x-request-id" in response.headers["access-control-expose-headers"].lower()
    failed = await service.http.post(PATH, json={}, headers={"Origin": PAGE})
    assert failed.status_code == 400
    assert failed.headers["access-control-allow-origin"] == PAGE

    other = "https://other.example"
    refused = await service.http.options(PATH, headers=preflight(other))
    assert refused.status_code == 400
    assert "access-control-allow-origin" not in refused.headers
    assert await status(service, Origin=other) == 403
    # A permitted page is no name of this server.
    assert await status(service, Host="evil.example", Origin=PAGE) == 421


@pytest.mark.parametrize("changes", [{"http_origins": ("*",)}])
async def test_all_pages_can_be_permitted(service: HttpService) -> None:
    for origin in (PAGE, "null"):
        response = await service.http.post(PATH, json=BODY, headers={"Origin": origin})
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "*"
