from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from frontend.callers.tenants import Tenant
from frontend.http.background import store
from shared.pb import scheduler_pb2
from tests.frontend.cluster import submitted
from tests.frontend.fake_scheduler import FakeScheduler
from tests.frontend.http.background.files import fill_disk
from tests.frontend.http.background.rig import (
    SIXTH,
    LocalServer,
    Rig,
    Server,
    background,
    backwards,
    begin,
    check_whole,
    events_of,
    final,
    finish,
    parse,
    text_of,
)
from tests.waiting import until

TOKENS = {"web": "w" * 20, "acme": "a" * 20}


@pytest.fixture
async def two_clients(rig: Rig, tmp_path: Path) -> tuple[Server, Server]:
    """Clients web and acme of one frontend."""
    path = tmp_path / "tokens"
    path.write_text("".join(f"{token} name={name}\n" for name, token in TOKENS.items()))
    path.chmod(0o600)
    server = await rig.local(auth_tokens_file=str(path))
    return await rig.client(server, TOKENS["web"]), await rig.client(server, TOKENS["acme"])


async def test_a_response_is_generated_although_nobody_asks(
    a: LocalServer, b: LocalServer, scheduler: FakeScheduler
) -> None:
    response = await begin(a, scheduler, 10)
    found = await b.until_ended(response)
    assert found["usage"]["output_tokens"] == 10
    assert found["output"][0]["status"] == "incomplete"
    events = await b.read(response)
    check_whole(events)
    assert final(events) == found == await a.get(response)
    assert parse(events[0][1])["response"]["status"] == "queued"


async def test_any_frontend_streams_while_another_generates(
    a: LocalServer, b: LocalServer, scheduler: FakeScheduler
) -> None:
    response = await begin(a, scheduler, 4)
    readers = [asyncio.create_task(server.read(response)) for server in (a, b)]
    assert (await b.get(response))["status"] == "in_progress"
    first = await b.read(response, until_number=4)
    await finish(scheduler)
    whole, others = await asyncio.gather(*readers)
    check_whole(whole)
    assert others == whole
    assert whole[:5] == first
    for server in (a, b):
        for after in (-1, 0, 4, len(whole) - 2):
            wanted = None if after < 0 else after
            assert await server.read(response, wanted) == whole[after + 1 :]
        assert await server.read(response, len(whole) - 1) == []
        assert await server.read(response, 10**12) == []


async def test_create_streams_too(a: LocalServer, b: LocalServer, scheduler: FakeScheduler) -> None:
    reader = asyncio.create_task(a.read_new(stream=True))
    await submitted(scheduler)
    await finish(scheduler)
    events = await reader
    check_whole(events)
    assert await b.read(final(events)["id"]) == events


async def test_a_response_goes_on_when_the_client_that_created_it_leaves(
    a: LocalServer, b: LocalServer, scheduler: FakeScheduler
) -> None:
    request = a.http.stream("POST", "/v1/responses", json=background(stream=True))
    async with request as answer, aclosing(events_of(answer)) as stream:
        await submitted(scheduler)
        _, event = await anext(stream)
        response = parse(event)["response"]["id"]
    await finish(scheduler)
    check_whole(await b.read(response))
    assert scheduler.aborts.empty()


async def test_cancelling_at_another_frontend_frees_the_engine(
    a: LocalServer, b: LocalServer, scheduler: FakeScheduler
) -> None:
    response = await begin(a, scheduler)
    reader = asyncio.create_task(a.read(response))
    before = await b.read(response, until_number=SIXTH)
    cancelled = (await b.http.post(f"/v1/responses/{response}/cancel")).json()
    assert cancelled["status"] == "cancelled"
    assert await b.get(response) == await a.get(response) == cancelled
    scheduler.step_all()
    await asyncio.wait_for(scheduler.aborts.get(), 60)
    whole = await reader
    check_whole(whole)
    assert whole[: SIXTH + 1] == before
    assert final(whole) == cancelled
    again = await a.http.post(f"/v1/responses/{response}/cancel")
    assert again.json() == cancelled


async def test_cancelling_an_ended_response_changes_nothing(
    a: LocalServer, scheduler: FakeScheduler
) -> None:
    response = await begin(a, scheduler, 10)
    ended = await a.until_ended(response)
    answer = await a.http.post(f"/v1/responses/{response}/cancel")
    assert answer.json() == ended


async def test_a_response_is_deleted_while_another_frontend_generates_it(
    a: LocalServer, b: LocalServer, scheduler: FakeScheduler, rig: Rig
) -> None:
    response = await begin(a, scheduler)
    reader = asyncio.create_task(a.read(response))
    await a.read(response, until_number=SIXTH)
    answer = await b.http.delete(f"/v1/responses/{response}")
    assert answer.json() == {"id": response, "object": "response", "deleted": True}
    scheduler.step_all()
    await asyncio.wait_for(scheduler.aborts.get(), 60)
    assert final(await reader)["status"] == "cancelled"
    for server in (a, b):
        assert (await server.http.get(f"/v1/responses/{response}")).status_code == 404
    assert not [*rig.responses.iterdir()]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", ""),
        ("GET", "?stream=true"),
        ("GET", "/input_items"),
        ("POST", "/cancel"),
        ("DELETE", ""),
    ],
)
async def test_clients_do_not_find_responses_of_others(
    two_clients: tuple[Server, Server], scheduler: FakeScheduler, method: str, path: str
) -> None:
    web, acme = two_clients
    response = await begin(web, scheduler)
    own = f"/v1/responses/{response}{path}"
    unknown = f"/v1/responses/resp_{32 * '0'}{path}"
    refusals = [await acme.http.request(method, own), await acme.http.request(method, unknown)]
    assert [each.status_code for each in refusals] == [404, 404]
    assert refusals[0].json() == refusals[1].json()
    await finish(scheduler)
    check_whole(await web.read(response))


async def test_a_response_counts_for_its_client_at_the_engine(
    two_clients: tuple[Server, Server], scheduler: FakeScheduler
) -> None:
    web, _ = two_clients
    await web.create()
    submit = await submitted(scheduler)
    assert submit.client.name == Tenant("web").name


async def test_input_items_are_listed_from_the_last_to_the_first(
    a: LocalServer, b: LocalServer, scheduler: FakeScheduler
) -> None:
    given = [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Two"},
        {"role": "user", "content": [{"type": "input_text", "text": "Three"}]},
    ]
    response = await begin(a, scheduler, input=given)
    found = (await b.http.get(f"/v1/responses/{response}/input_items")).json()
    items = found["data"]
    assert [item["content"][0]["text"] for item in items] == ["Three", "Two", "One"]
    kinds = ["input_text", "output_text", "input_text"]
    assert [item["content"][0]["type"] for item in items] == kinds
    assert (found["first_id"], found["last_id"]) == (items[0]["id"], items[-1]["id"])
    query = {"order": "asc"}
    other = await b.http.get(f"/v1/responses/{response}/input_items", params=query)
    assert other.json()["data"] == items[::-1]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"starting_after": "3"}, "starting_after"),
        ({"stream": "false", "starting_after": "3"}, "starting_after"),
        ({"stream": "true", "starting_after": "-1"}, "starting_after"),
        ({"stream": "true", "starting_after": "x"}, "starting_after"),
        ({"stream": "true", "starting_after": "9" * 30}, "starting_after"),
    ],
)
async def test_a_wrong_position_is_rejected(
    a: LocalServer, scheduler: FakeScheduler, query: dict[str, str], param: str
) -> None:
    response = await begin(a, scheduler)
    answer = await a.http.get(f"/v1/responses/{response}", params=query)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"store": False}, "store"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"resume_token_ids": [5]}, "resume_token_ids"),
    ],
)
async def test_parameters_that_exclude_the_background_are_rejected(
    a: LocalServer, rig: Rig, body: dict[str, Any], param: str
) -> None:
    answer = await a.http.post("/v1/responses", json=background(**body))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert not rig.responses.exists()


async def test_without_a_directory_there_is_no_background(rig: Rig) -> None:
    server = await rig.local(responses_directory="")
    answer = await server.http.post("/v1/responses", json=background())
    assert answer.status_code == 400
    assert "NANO_RESPONSES_DIRECTORY" in answer.json()["error"]["message"]
    answer = await server.http.get(f"/v1/responses/resp_{32 * '0'}")
    assert answer.status_code == 404


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_disk_ends_new_responses_alone(
    a: LocalServer,
    rig: Rig,
    scheduler: FakeScheduler,
    monkeypatch: pytest.MonkeyPatch,
    stream: bool,
) -> None:
    fill_disk(monkeypatch, rig.responses, 0)
    answer = await a.http.post("/v1/responses", json=background(stream=stream))
    assert answer.status_code == 503
    assert answer.headers["content-type"] == "application/json"
    assert not [*rig.responses.iterdir()]
    assert scheduler.submits.empty()
    reader = asyncio.create_task(a.read_new(background=False, stream=True))
    await submitted(scheduler)
    await finish(scheduler)
    check_whole(await reader)


async def test_a_response_waits_while_the_disk_is_full(
    a: LocalServer, rig: Rig, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    response = await begin(a, scheduler)
    before = await a.read(response, until_number=SIXTH)
    make_room = fill_disk(monkeypatch, rig.responses, 3)
    assert (await a.http.post(f"/v1/responses/{response}/cancel")).status_code == 503
    scheduler.step_all()
    again = await submitted(scheduler)  # its first try failed
    make_room()
    scheduler.next_token = backwards
    await finish(scheduler)
    whole = before + await a.read(response, SIXTH)
    check_whole(whole)
    assert final(whole)["usage"]["output_tokens"] == 10
    assert len(again.generated_ids) // 4 == 6


async def test_too_many_responses_are_refused(
    a: LocalServer, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_RESPONSES", 1)
    response = await begin(a, scheduler)
    answer = await a.http.post("/v1/responses", json=background())
    assert answer.status_code == 503
    await finish(scheduler)
    await a.until_ended(response)
    await a.create()
    assert (await a.http.get(f"/v1/responses/{response}")).status_code == 404


async def test_old_responses_disappear(
    a: LocalServer, rig: Rig, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    response = await begin(a, scheduler, 10)
    await a.until_ended(response)
    monkeypatch.setattr("frontend.http.background.responses.MAX_AGE_S", -60.0)
    await until(lambda: not [*rig.responses.iterdir()], "the next sweep")
    assert (await a.http.get(f"/v1/responses/{response}")).status_code == 404


async def test_a_stop_string_ends_the_response_with_its_text(
    a: LocalServer, b: LocalServer, scheduler: FakeScheduler
) -> None:
    response = await begin(a, scheduler, 10, stop=["upon"])
    whole = await b.read(response)
    check_whole(whole)
    assert text_of(final(whole)) == "user\nOnce "
    assert final(whole)["status"] == "completed"


async def test_a_response_that_fails_says_so(a: LocalServer, scheduler: FakeScheduler) -> None:
    internal = scheduler_pb2.FINISH_CAUSE_INTERNAL
    scheduler.rejection = scheduler_pb2.Finished(cause=internal)
    response = await begin(a, scheduler, 0)
    whole = await a.read(response)
    check_whole(whole)
    assert final(whole)["status"] == "failed"
    assert final(whole)["error"]["code"] == "server_error"
    assert parse(whole[-1][1])["type"] == "response.failed"
