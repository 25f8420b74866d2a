"""An InferenceService whose tokens can be worked out by hand, on a real gRPC server.

A token is a character's code. A prompt's completion repeats its characters, each shifted by one in
the alphabet: "abc" becomes "bcdbcd...". A chat is the prompt of its messages, joined. Completion i
of several is shifted by i more, as is that of a seed i below 90.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from grpc import aio

from nano_vllm_grpc.pb import frontend_pb2 as pb
from nano_vllm_grpc.pb.frontend_pb2_grpc import (
    InferenceServiceServicer,
    add_InferenceServiceServicer_to_server,
)
from shared.errors import InternalError, InvalidArgumentError, ServiceError, UnavailableError
from shared.rpc.interceptors import StatusInterceptor
from shared.rpc.reading import MessageReader

Responses = AsyncIterator[pb.GenerateStreamResponse]

DEFAULT_MAX_TOKENS = 8
MAX_MODEL_LEN = 200
VOCAB_SIZE = 20_000
EOS = 0
ENDLESS_SEED = 99  # a request with this seed streams until it is cancelled


class FakeService(InferenceServiceServicer):
    """The service. Tests read what it received, and set what is to go wrong, in its attributes."""

    def __init__(self) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self.refusals: deque[ServiceError] = deque()  # raised by the next requests, one each
        self.cuts: deque[int] = deque()  # chunks after which the next streams break off, one each
        self.cut_error: ServiceError = UnavailableError("cut")
        self.peers: list[str] = []
        self.tokens_per_chunk = 1
        self.in_flight = 0
        self.max_in_flight = 0
        self.streaming = threading.Event()
        self.cancelled = threading.Event()
        self.max_model_len = MAX_MODEL_LEN
        self.start_together = 1  # no request goes on before this many are open
        self._all_open = asyncio.Event()

    async def GenerateStream(self, request: pb.GenerateRequest, context: Any) -> Responses:
        self.requests.append(request)
        self.peers.append(context.peer())
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        if self.in_flight >= self.start_together:
            self._all_open.set()
        try:
            await self._all_open.wait()
            if self.refusals:
                raise self.refusals.popleft()
            left = self.cuts.popleft() if self.cuts else None
            async for response in self._respond(request):
                if left == 0:
                    break
                yield response
                left = None if left is None else left - 1
                self.streaming.set()
            if left is not None:
                raise self.cut_error
        except (asyncio.CancelledError, GeneratorExit):  # the latter while a chunk is written
            self.cancelled.set()
            raise
        finally:
            self.in_flight -= 1

    async def _respond(self, request: pb.GenerateRequest) -> Responses:
        prompt = _prompt_tokens(request)
        if not prompt:
            raise InvalidArgumentError("prompt", "is empty; the limit is 1 token or more")
        endless = request.sampling.seed == ENDLESS_SEED
        total = request.sampling.max_tokens or DEFAULT_MAX_TOKENS
        if len(prompt) + total > self.max_model_len:
            raise InvalidArgumentError(
                "sampling.max_tokens", f"{len(prompt)} + {total} exceed {self.max_model_len}"
            )
        sampling = request.sampling
        count = sampling.beam_width or sampling.n or 1
        first = offset = len(request.resume_token_ids)
        while endless or offset < total:
            # Lets other requests start, as a model would.
            await asyncio.sleep(0.005 if endless else 0)
            size = self.tokens_per_chunk if endless else min(self.tokens_per_chunk, total - offset)
            for index in range(count):
                shift = 1 + index + (sampling.seed if sampling.seed < 90 else 0)
                ids = [prompt[(offset + i) % len(prompt)] + shift for i in range(size)]
                response = pb.GenerateStreamResponse(
                    request_id=request.request_id or "made",
                    index=index,
                    text="".join(map(chr, ids)),
                    token_ids=ids,
                    token_offset=offset,
                )
                if sampling.HasField("logprobs"):
                    response.logprobs.extend(_logprobs(i, sampling.logprobs) for i in ids)
                if sampling.HasField("prompt_logprobs") and (offset, index) == (first, 0):
                    rows = (_logprobs(i, sampling.prompt_logprobs) for i in prompt[1:])
                    response.prompt_logprobs.extend([pb.Logprobs(), *rows])
                if not endless and offset + size == total:
                    response.finish_reason = pb.FINISH_REASON_LENGTH
                    response.score = -0.5 - index if sampling.beam_width else 0
                    if index == count - 1:
                        response.usage.prompt_tokens = len(prompt)
                        response.usage.completion_tokens = count * total
                        response.timings.total_s = 0.5
                yield response
            offset += size

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        return pb.TokenizeResponse(token_ids=_prompt_tokens(request))

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: Any
    ) -> pb.DetokenizeResponse:
        return pb.DetokenizeResponse(text="".join(map(chr, request.token_ids)))

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        return pb.GetModelResponse(
            model="fake",
            max_model_len=self.max_model_len,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=[EOS],
            default_sampling=pb.SamplingParams(temperature=0.0, max_tokens=DEFAULT_MAX_TOKENS),
            capacity=pb.EngineCapacity(num_blocks=8, block_size=16, max_num_seqs=4),
        )

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        raise InternalError("the client uses GenerateStream")


def _logprobs(token: int, count: int) -> pb.Logprobs:
    """Log-probabilities of the token and of `count` others."""
    others = [pb.Logprob(token_id=i, logprob=-i - 1) for i in range(count)]
    return pb.Logprobs(entries=[pb.Logprob(token_id=token, logprob=-0.5), *others])


def _prompt_tokens(request: pb.GenerateRequest | pb.TokenizeRequest) -> list[int]:
    match request.WhichOneof("prompt"):
        case "text":
            return [ord(c) for c in request.text]
        case "chat":
            return [ord(c) for m in request.chat.messages for c in m.content]
        case "token_ids":
            assert isinstance(request, pb.GenerateRequest)
            return list(request.token_ids.ids)
        case _:
            return []


class FakeServer:
    """The service, and the address it listens at."""

    def __init__(self, service: FakeService, address: str, stop: Callable[[], None]) -> None:
        """`stop`: ends the service and breaks off open calls."""
        self.service = service
        self.address = address
        self.stop = stop


@contextmanager
def running_server() -> Iterator[FakeServer]:
    """Serves on a thread of its own, so that tests may block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    service = FakeService()

    async def start() -> tuple[aio.Server, str]:
        server = aio.server(interceptors=[StatusInterceptor(), MessageReader()])
        add_InferenceServiceServicer_to_server(service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, f"127.0.0.1:{port}"

    server, address = asyncio.run_coroutine_threadsafe(start(), loop).result(60)

    def stop() -> None:
        asyncio.run_coroutine_threadsafe(server.stop(None), loop).result(60)

    try:
        yield FakeServer(service, address, stop)
    finally:
        stop()
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()
