from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from frontend.callers.admission import Admission
from frontend.callers.audit import Audit, Usage
from frontend.http.background import responses
from frontend.http.background.events import ResponseEvents
from frontend.http.background.responses import BackgroundResponses
from frontend.http.background.store import ResponseStore
from frontend.http.formats.parser import CallArguments, CallBegin, Content, Reasoning
from frontend.request import GenerationRequest, Sampling
from frontend.text.tokenizer import Tokenizer
from shared.rpc.open_calls import OpenCalls
from tests.frontend.conftest import DEMO
from tests.frontend.http.background.files import adopt, create, opened

USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 9,
    "total_tokens": 12,
    "prompt_tokens_details": None,
}
END = {"end": "length", "usage": USAGE}
GREETING = [3, 250, 251, 300, 301, 302, 400, 401]


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Tokenizer]:
    tokenizer = Tokenizer(DEMO, 1)
    yield tokenizer
    tokenizer.close()


@pytest.fixture(autouse=True)
def polls_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "_POLL_S", 0.0)


class Stored:
    """A directory with one response, and a frontend that reads it."""

    def __init__(self, directory: str, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        generations = SimpleNamespace(
            vocabulary_of=lambda request: tokenizer.text_vocabulary,
            engines=SimpleNamespace(serving=True, model_fingerprints=["m"]),
        )
        self.generations = cast("Any", generations)
        self.frontend = BackgroundResponses(
            directory,
            self.generations,
            Admission(None, 10, Audit(Usage())),
            OpenCalls(),
            reports_cached=False,
        )
        sampling = Sampling(
            temperature=1.0,
            seed=1,
            max_tokens=100,
            eos_token_ids=(0,),
            stop_token_ids=(),
            stop=tuple(stop),
        )
        self.store = ResponseStore(directory)
        self.owner = create(
            self.store,
            request=responses._request_json(GenerationRequest("r", [1, 2, 3], sampling, None)),
            model=["m"],
            reasoning="none",
            tools="",
            peer="ipv4:127.0.0.1:1",
        )

    async def read(self, after: int = -1, into: list[bytes] | None = None) -> list[bytes]:
        """All events up to the end, as they come."""
        found = [] if into is None else into
        stored = opened(self.store)
        async for events in self.frontend.events(stored, after):
            found += split(events)
        stored.close()
        return found

    async def response(self) -> Any:
        return await self.frontend.response(opened(self.store))


def split(events: bytes) -> list[bytes]:
    return [each + b"\n\n" for each in events.split(b"\n\n")[:-1]]


def parsed(events: Sequence[bytes]) -> list[Any]:
    return [orjson.loads(event.partition(b"data: ")[2]) for event in events]


def deltas(events: Sequence[bytes], kind: str = "output_text") -> str:
    name = f"response.{kind}.delta"
    return "".join(each["delta"] for each in parsed(events) if each["type"] == name)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def reading(stored: Stored, tokens: Sequence[int], sizes: Sequence[int]) -> list[bytes]:
    """Appends tokens in groups of these sizes, while readers follow. They must all get the same."""
    readers = [asyncio.create_task(stored.read()), asyncio.create_task(stored.read(5))]
    position = 0
    for number, size in enumerate(sizes):
        stored.owner.append(tokens[position : position + size])
        position += size
        await turns(number % 4)
        readers.append(asyncio.create_task(stored.read(number)))
    stored.owner.append(tokens[position:])
    stored.owner.finish(END)
    first, second, *others = await asyncio.gather(*readers)
    assert second == first[6:]
    assert others == [first[number + 1 :] for number in range(len(others))]
    return first


@given(
    st.lists(st.integers(0, 1535), max_size=80),
    st.lists(st.integers(0, 9), max_size=12),
    st.sampled_from([(), ("e",), (" the", "th")]),
)
@example(GREETING * 20, [70, 80], ())
@settings(max_examples=60)
def test_events_are_the_same_however_tokens_are_grouped(
    tokenizer: Tokenizer, tokens: list[int], sizes: list[int], stop: tuple[str, ...]
) -> None:
    found = []
    for groups in (sizes, [1] * len(tokens), []):
        with TemporaryDirectory() as directory:
            stored = Stored(directory, tokenizer, stop)
            found.append(asyncio.run(reading(stored, tokens, groups)))
            final = asyncio.run(stored.response())
            stored.owner.close()
    assert found[0] == found[1] == found[2]
    events = parsed(found[0])
    assert [each["sequence_number"] for each in events] == [*range(len(events))]
    assert events[-1]["response"] == final
    text = final["output"][0]["content"][0]["text"] if final["output"] else ""
    assert deltas(found[0]) == text
    assert not any(each in text for each in stop)


async def test_a_cut_at_any_byte_changes_no_event_before_it(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    stored = Stored(str(tmp_path), tokenizer)
    size = stored.owner.path.stat().st_size
    for token in GREETING:
        stored.owner.append([token])
    stored.owner.finish(END)
    stored.owner.close()
    whole = await stored.read()
    content = stored.owner.path.read_bytes()
    for cut in range(size, len(content)):
        stored.owner.path.unlink()
        stored.owner.path.write_bytes(content[:cut])
        before: list[bytes] = []
        reader = asyncio.create_task(stored.read(into=before))
        await turns(8)
        seen = before[:]
        assert len(seen) >= 2
        assert whole[: len(seen)] == seen
        adopted = adopt(stored.store)
        adopted.append(GREETING[::-1])  # the engine continues with other tokens
        adopted.finish({"end": "stop", "usage": USAGE})
        adopted.close()
        after = await stored.read(len(seen) - 1)
        assert await reader == seen + after == await stored.read()
        assert parsed(after)[-1]["type"] == "response.completed"


async def test_a_file_of_another_version_is_read(tokenizer: Tokenizer, tmp_path: Path) -> None:
    stored = Stored(str(tmp_path), tokenizer)
    header = orjson.loads(stored.owner.path.read_bytes())
    header["request"] |= {"later": 1}
    header["request"]["sampling"] |= {"later": 1}
    del header["request"]["priority"]
    stored.owner.path.write_bytes(orjson.dumps(header))
    assert (await stored.response())["output"] == []


async def test_after_the_end_there_is_nothing(tokenizer: Tokenizer, tmp_path: Path) -> None:
    stored = Stored(str(tmp_path), tokenizer)
    stored.owner.append(GREETING)
    stored.owner.finish(END)
    events = await stored.read()
    last = len(events) - 1
    assert await stored.read(last - 1) == events[-1:]
    assert await stored.read(last) == await stored.read(10**18) == []


@pytest.mark.parametrize(
    ("reason", "status", "event", "of_item"),
    [
        ("stop", "completed", "response.completed", "completed"),
        ("length", "incomplete", "response.incomplete", "incomplete"),
        ("cancelled", "cancelled", "response.incomplete", "incomplete"),
        ("failed", "failed", "response.failed", "incomplete"),
    ],
)
async def test_the_last_event_says_how_the_response_ended(
    tokenizer: Tokenizer, tmp_path: Path, reason: str, status: str, event: str, of_item: str
) -> None:
    stored = Stored(str(tmp_path), tokenizer)
    stored.owner.append(GREETING)
    error = {"code": "server_error", "message": "why"} if reason == "failed" else None
    stored.owner.finish({"end": reason, "error": error})
    last = parsed(await stored.read())[-1]
    response = await stored.response()
    assert last["type"] == event
    assert last["response"] == response
    assert response["status"] == status
    assert response["error"] == error
    assert response["output"][0]["status"] == of_item
    details = {"reason": "max_output_tokens"} if reason == "length" else None
    assert response.get("incomplete_details") == details


def test_items_are_added_filled_and_done_in_order() -> None:
    events = ResponseEvents({"id": "resp_1", "output": []})
    events.start()
    events.feed([Reasoning("Let me "), Reasoning("think")], 2)
    events.feed([Content("The "), Content("answer")], 2)
    events.feed([CallBegin("add"), CallArguments('{"a":'), CallArguments("1}")], 3)
    events.feed([CallBegin("now")], 1)
    events.feed([Content("Done.")], 1)
    events.end("stop", USAGE)
    made = events.take()
    assert events.take() == []
    found = parsed(made)
    assert [each["sequence_number"] for each in found] == [*range(len(found))]
    assert [event.partition(b"\n")[0] for event in made] == [
        b"event: " + each["type"].encode() for each in found
    ]
    output = found[-1]["response"]["output"]
    kinds = ["reasoning", "message", "function_call", "function_call", "message"]
    assert [item["type"] for item in output] == kinds
    assert len({item["id"] for item in output}) == 5
    assert deltas(made, "reasoning_text") == output[0]["content"][0]["text"] == "Let me think"
    assert deltas(made) == "The answer" + "Done."
    assert deltas(made, "function_call_arguments") == output[2]["arguments"] == '{"a":1}'
    for index, item in enumerate(output):
        of_item = [each for each in found if each.get("output_index") == index]
        assert of_item[0]["type"] == "response.output_item.added"
        assert of_item[0]["item"]["status"] == "in_progress"
        assert of_item[-1] == {
            "type": "response.output_item.done",
            "sequence_number": of_item[-1]["sequence_number"],
            "output_index": index,
            "item": item,
        }
        numbers = [each["sequence_number"] for each in of_item]
        assert numbers == [*range(numbers[0], numbers[-1] + 1)]
    usage = found[-1]["response"]["usage"]
    assert usage["output_tokens_details"] == {"reasoning_tokens": 2}
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (3, 9, 12)


async def test_whoever_stops_takes_no_response(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "_SWEEP_S", 0.0)
    stored = Stored(str(tmp_path), tokenizer)
    begun: list[GenerationRequest] = []

    async def begin(request: GenerationRequest, received_at: float) -> None:
        begun.append(request)
        await asyncio.Event().wait()

    stored.generations.begin = begin
    stored.owner.append(GREETING)
    stored.owner.close()
    stored.frontend.stop()
    sweep = asyncio.create_task(stored.frontend.sweep())
    await turns(50)
    assert not begun
    adopt(stored.store).close()
    # Another frontend does.
    other = Stored(str(tmp_path / "other"), tokenizer)
    other.generations.begin = begin
    other.owner.close()
    sweeps = [sweep, asyncio.create_task(other.frontend.sweep())]
    await turns(50)
    assert [request.request_id for request in begun] == ["r"]
    assert [*other.store.unfinished()] == []
    other.frontend.stop()
    await turns(5)
    adopt(other.store).close()
    for each in sweeps:
        each.cancel()
    await asyncio.gather(*sweeps, return_exceptions=True)
