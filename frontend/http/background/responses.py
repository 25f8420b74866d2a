"""Responses that are generated in the background, whoever listens, and by whichever frontend lives.

Tokens are stored before an event shows them, so events read from the file never contradict those
that a client has received, even if the engine would now generate other tokens.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, fields
from datetime import UTC, datetime

import structlog
from pydantic import TypeAdapter

from frontend.callers.admission import Admission
from frontend.callers.call import CALL, Call
from frontend.callers.tenants import Tenant
from frontend.generation import REASONS
from frontend.generations import Generations
from frontend.http.answers import AnswerForm, usage
from frontend.http.background.events import Json, ResponseEvents
from frontend.http.background.store import MAX_AGE_S, ResponseStore, StoredResponse
from frontend.http.errors import HttpError, public, response_error
from frontend.http.formats.parser import AnswerParser
from frontend.http.formats.tool_format import ToolFormat
from frontend.request import GenerationRequest, Sampling
from frontend.text.completion import CompletionBuilder
from shared.errors import (
    FailedPreconditionError,
    NotFoundError,
    QueueFullError,
    ServiceError,
    UnavailableError,
)
from shared.rpc.open_calls import OpenCalls

log = structlog.get_logger(__name__)

METHOD = "/v1/responses (background)"
_SWEEP_S = 1.0
_POLL_S = 0.05  # of a response that another process generates
_TOKENS_AT_ONCE = 64
_SAMPLING = TypeAdapter(Sampling)


class BackgroundResponses:
    """The responses of this host's frontends.

    Args:
        directory: of the files; empty: there are no background responses.
        reports_cached: whether callers learn how many of their prompt tokens were cached.
    """

    def __init__(
        self,
        directory: str,
        generations: Generations,
        admission: Admission,
        calls: OpenCalls,
        *,
        reports_cached: bool,
    ) -> None:
        self._store = ResponseStore(directory) if directory else None
        self._generations = generations
        self._admission = admission
        self._calls = calls
        self._reports_cached = reports_cached
        self._stopping = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._news: dict[str, asyncio.Event] = {}  # of responses that are generated here

    async def create(
        self, request: GenerationRequest, form: AnswerForm, response: Json, items: list[Json]
    ) -> StoredResponse:
        """Stores a response, and begins to generate it.

        Args:
            response: before its first token.
            items: of its input.

        Raises:
            HttpError: there is no directory.
            ServiceError: there is no room for it, or no engine takes it.
        """
        if self._store is None:
            raise HttpError(
                400,
                "background: not served; responses_directory (NANO_RESPONSES_DIRECTORY) is empty",
                param="background",
            )
        call = CALL.get()
        header = {
            "response": response,
            "input": items,
            "request": _request_json(request),
            "model": self._generations.engines.model_fingerprints,
            "peer": call.peer if call else "",
            "reasoning": form.reasoning,
            "tools": form.tools.name if form.tools else "",
        }
        owner = request.client.name if request.client else ""
        stored = self._store.create(owner, response["id"], header)
        started = asyncio.get_running_loop().create_future()
        if call:
            self._admission.release(call)  # for the generation
        self._begin(stored, started)
        await asyncio.shield(started)
        return self.open(owner, response["id"])

    def open(self, owner: str, response_id: str) -> StoredResponse:
        """Finds a client's response, which the caller closes.

        Raises:
            NotFoundError: the client has no such response on this host.
        """
        if self._store and (found := self._store.open(owner, response_id)):
            return found
        raise NotFoundError(
            "response: not found; only background responses are stored, for a day, by the "
            "frontends of one host or pod"
        )

    def cancel(self, stored: StoredResponse) -> None:
        """Ends a response, unless it has ended. Whoever generates it notices.

        Raises:
            UnavailableError: the disk is full.
        """
        try:
            stored.finish({"end": "cancelled"})
        except OSError as error:
            raise UnavailableError(f"cannot store the end of the response: {error}") from error
        self._tell(stored.id)

    def delete(self, stored: StoredResponse) -> None:
        """Ends a response and deletes it."""
        with suppress(UnavailableError):
            self.cancel(stored)
        stored.delete()

    async def events(self, stored: StoredResponse, after: int) -> AsyncIterator[bytes]:
        """Yields a response's events with a number above `after`, until its end."""
        events = ResponseEvents(stored.header["response"])
        for news in self._replay(stored, events):
            if made := events.take(after):
                yield b"".join(made)
            await asyncio.sleep(0)
            if news:
                with suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_S):
                        await news.wait()

    async def response(self, stored: StoredResponse) -> Json:
        """A response so far."""
        events = ResponseEvents(stored.header["response"])
        for news in self._replay(stored, events):
            if news:
                break
            events.take()
            await asyncio.sleep(0)
        return events.response

    def _replay(
        self, stored: StoredResponse, events: ResponseEvents
    ) -> Iterator[asyncio.Event | None]:
        """Makes events of a response's tokens, always the same, until its end.

        Yields at intervals. When all stored tokens were fed, it yields an event that is set when
        this process stores the next ones.
        """
        header = stored.header
        request = _request(header["request"], (), None)
        builder = CompletionBuilder(self._generations.vocabulary_of(request), request.sampling)
        tools = ToolFormat[header["tools"]] if header["tools"] else None
        parser = AnswerParser(reasoning=header["reasoning"], tools=tools)
        events.start()
        num_tokens = 0
        while True:
            news = self._news.get(stored.id) or asyncio.Event()
            stored.refresh()
            while num_tokens < len(stored.tokens) and builder.stop_string is None:
                text = builder.feed([stored.tokens[num_tokens]]).text
                num_tokens += 1
                events.feed(parser.feed(text), 1)
                if num_tokens % _TOKENS_AT_ONCE == 0:
                    yield None
            if (end := stored.end) is not None:
                events.feed([*parser.feed(builder.finish()), *parser.finish()], 0)
                events.end(end["end"], end.get("usage"), end.get("error"))
                yield None
                return
            yield news

    async def sweep(self) -> None:
        """Continues responses whose frontends are gone, and deletes old ones, until cancelled."""
        while self._store:
            await asyncio.sleep(_SWEEP_S)
            if self._stopping or not self._generations.engines.serving:
                continue
            try:
                for stored in self._store.unfinished():
                    log.info("continuing a response", response=stored.id, tokens=len(stored.tokens))
                    self._begin(stored)
                    await asyncio.sleep(0)
                oldest = datetime.now(UTC).timestamp() - MAX_AGE_S
                self._store.delete_older_than(oldest)
            except OSError as error:
                log.warning("cannot continue responses; trying again", reason=str(error))

    def stop(self) -> None:
        """Leaves all responses to other frontends, or to the next fork."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()

    def _begin(self, stored: StoredResponse, started: asyncio.Future[None] | None = None) -> None:
        task = asyncio.create_task(self._generate(stored, started))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _generate(self, stored: StoredResponse, started: asyncio.Future[None] | None) -> None:
        """Generates a response's tokens after those that are stored. If that fails for now, a
        frontend tries again.

        Args:
            started: of a new response; an error at its start deletes it.
        """
        self._news[stored.id] = asyncio.Event()
        failure: ServiceError | None = None
        try:
            async with self._calls.span(METHOD):
                await self._store_tokens(stored, started)
        except (QueueFullError, UnavailableError) as error:
            failure = error
            log.info("a response waits", response=stored.id, reason=str(error))
        except OSError as error:
            log.error("cannot store tokens; trying again", response=stored.id, reason=str(error))
        except Exception as error:
            failure = public(error)
            if failure is not error:
                log.error("response failed", response=stored.id, exc_info=error)
            with suppress(OSError):
                stored.finish({"end": "failed", "error": response_error(failure)})
        finally:
            if started and not started.done():
                if failure:
                    stored.delete()
                    started.set_exception(failure)
                else:  # this process stops, and another one continues
                    started.set_result(None)
            stored.close()
            self._tell(stored.id)
            del self._news[stored.id]

    async def _store_tokens(
        self, stored: StoredResponse, started: asyncio.Future[None] | None
    ) -> None:
        given = stored.header["request"]
        client = self._admission.named(given["client"])
        if given["client"] and client is None:
            raise NotFoundError("client: it has no token any longer")
        if not {*stored.header["model"]} & {*self._generations.engines.model_fingerprints}:
            raise FailedPreconditionError("the model that began this is no longer served")
        request = _request(given, stored.tokens, client)
        call = Call(METHOD, stored.header["peer"], client)
        with self._admission.placed(call, ""):
            generation = await self._generations.begin(request, time.monotonic())
            with closing(generation):
                if started:
                    started.set_result(None)
                while not generation.ended:
                    for _, delta in await generation.next_deltas():
                        stored.append(delta.token_ids)
                        self._tell(stored.id)
                        if stored.end is not None:
                            return
                (ending,) = generation.endings
                used = usage([generation.totals()], reports_cached=self._reports_cached)
                stored.finish({"end": REASONS[ending.reason], "usage": used})

    def _tell(self, response_id: str) -> None:
        """Wakes the readers of a response in this process."""
        if event := self._news.get(response_id):
            self._news[response_id] = asyncio.Event()
            event.set()


def _request_json(request: GenerationRequest) -> Json:
    return asdict(request) | {
        "prompt_ids": list(request.prompt_ids),
        "client": request.client.name if request.client else "",
    }


def _request(given: Json, tokens: Sequence[int], client: Tenant | None) -> GenerationRequest:
    """Reads a stored request, even of a frontend of another version on this host."""
    known = {
        each.name: given[each.name] for each in fields(GenerationRequest) if each.name in given
    }
    read = {
        "prompt_ids": array("I", given["prompt_ids"]),
        "sampling": _SAMPLING.validate_python(given["sampling"]),
        "deadline": None,
        "resume_token_ids": list(tokens),
        "client": client,
    }
    return GenerationRequest(**(known | read))
