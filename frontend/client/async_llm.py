"""The client for asyncio programs; `frontend.client.LLM` is this one behind plain calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from grpc import aio

from frontend.client import wire
from frontend.client.errors import LLMError, QueueFullError, from_rpc_error
from frontend.client.progress import Progress
from frontend.client.types import (
    Chunk,
    Completion,
    Message,
    ModelInfo,
    Prompt,
    SamplingParams,
    as_prompts,
    as_resume_ids,
    as_sampling_params,
    is_chat,
    join,
)
from shared.pb import frontend_pb2 as pb
from shared.pb.frontend_pb2_grpc import InferenceServiceStub

if TYPE_CHECKING:
    from shared.pb.frontend_pb2_grpc import InferenceServiceAsyncStub

Response = TypeVar("Response")

# A whole prompt with logprobs can be over gRPC's 4 MB.
_CHANNEL_OPTIONS = (("grpc.max_receive_message_length", -1),)
_MIN_RETRY_DELAY_S = 0.01


class AsyncLLM:
    """A connection to a server, for one event loop.

        async with AsyncLLM("127.0.0.1:50051") as llm:
            async for chunk in llm.stream("Once upon a time"):
                print(chunk.text, end="")

    Every method raises `frontend.client.errors.LLMError`.

    Args:
        address: `host:port` or `unix:path` of a frontend.
        max_in_flight: requests that `generate` has open at a time; the others wait here.
        max_retry_wait_s: how long a request may wait, all in all, for a full server that says
            when to come back (RetryInfo). Nothing else is tried again.
    """

    def __init__(
        self, address: str, *, max_in_flight: int = 512, max_retry_wait_s: float = 300.0
    ) -> None:
        self.address = address
        self._max_in_flight = max_in_flight
        self._max_retry_wait_s = max_retry_wait_s
        self._channel: aio.Channel | None = None

    @cached_property
    def _stub(self) -> InferenceServiceAsyncStub:
        # Not in __init__: a channel belongs to the loop that runs when it is made.
        self._channel = aio.insecure_channel(self.address, options=_CHANNEL_OPTIONS)
        return InferenceServiceStub(self._channel)

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        timeout_s: float | None = None,
        priority: int = 0,
        cache_salt: str = "",
        resume_token_ids: Sequence[int] | Sequence[Sequence[int]] = (),
    ) -> list[Completion]:
        """Completions in the order of the prompts, `n` or `beam_width` of each where asked for.

        All prompts are sent at once, up to `max_in_flight`. The first error cancels the others
        and is raised.

        Args:
            prompts: one prompt or a list: each a text, token ids, or a chat.
            sampling_params: one for all, or one per prompt.
            use_tqdm: show progress with prefill and decode tokens/s on stderr.
            timeout_s: deadline of each request from when it is sent.
            priority: lower goes first.
            cache_salt: cached prefixes are shared only among requests of the same salt.
            resume_token_ids: tokens of the completion that there are already, to go on after; for
                several prompts a list of them for each.
        """
        items = as_prompts(prompts)
        params = as_sampling_params(sampling_params, len(items))
        resumed = as_resume_ids(resume_token_ids, len(items))
        slots = asyncio.Semaphore(self._max_in_flight)
        progress = Progress(len(items), shown=use_tqdm)

        async def run(
            prompt: Prompt, each: SamplingParams, resume: Sequence[int]
        ) -> list[Completion]:
            async with slots:
                stream = self.stream(
                    prompt,
                    each,
                    timeout_s=timeout_s,
                    priority=priority,
                    cache_salt=cache_salt,
                    resume_token_ids=resume,
                )
                return await self._complete(prompt, stream, progress)

        each_one = zip(items, params, resumed, strict=True)
        tasks = [asyncio.create_task(run(*arguments)) for arguments in each_one]
        try:
            results = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            progress.close()
        return [completion for completions in results for completion in completions]

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        timeout_s: float | None = None,
        priority: int = 0,
        cache_salt: str = "",
        resume_token_ids: Sequence[int] = (),
    ) -> AsyncGenerator[Chunk, None]:
        """The completion as it is made; the chunks of several take turns. Closing the iterator
        (`aclose`, or cancelling the task that waits for it) cancels the request.

        Args:
            timeout_s, priority, cache_salt: as for `generate`.
            resume_token_ids: tokens of the completion that there are already, to go on after.
        """
        params = sampling_params or SamplingParams()
        request = wire.encode_request(prompt, params, priority, cache_salt, resume_token_ids)
        loop = asyncio.get_running_loop()
        start = loop.time()
        retry_until = start + min(self._max_retry_wait_s, timeout_s or float("inf"))
        while True:
            left = None if timeout_s is None else timeout_s - (loop.time() - start)
            call = self._stub.GenerateStream(request, timeout=left)
            begun = False
            try:
                async for message in call:
                    begun = True
                    yield wire.decode_chunk(message)
                return
            except aio.AioRpcError as error:
                delay = self._retry_delay(error, begun, retry_until - loop.time())
            finally:
                call.cancel()
            await asyncio.sleep(delay)

    async def tokenize(self, prompt: str | Sequence[Message]) -> list[int]:
        """Token ids of a text, or of a chat as the model's template writes it."""
        request = wire.encode_tokenize(prompt)
        return list((await self._call(lambda stub: stub.Tokenize(request))).token_ids)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        request = wire.encode_detokenize(token_ids)
        return (await self._call(lambda stub: stub.Detokenize(request))).text

    async def get_model(self) -> ModelInfo:
        """What the server serves, and its limits."""
        request = pb.GetModelRequest()
        return wire.decode_model(await self._call(lambda stub: stub.GetModel(request)))

    async def close(self) -> None:
        """Ends the connection; requests in progress are cancelled."""
        if self._channel is not None:
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _complete(
        self,
        prompt: Prompt,
        stream: AsyncGenerator[Chunk, None],
        progress: Progress,
    ) -> list[Completion]:
        prompt_tokens = await self._count_tokens(prompt) if progress.shown else 0
        chunks: dict[int, list[Chunk]] = {}
        prompt_logprobs: list[dict[int, float]] = []
        with progress.request(prompt_tokens) as received:
            async with aclosing(stream):
                async for chunk in stream:
                    received(len(chunk.token_ids))
                    chunks.setdefault(chunk.index, []).append(chunk)
                    prompt_logprobs += chunk.prompt_logprobs
        return [join(chunks[index], chunk, prompt_logprobs) for index in sorted(chunks)]

    async def _count_tokens(self, prompt: Prompt) -> int:
        if isinstance(prompt, str) or is_chat(prompt):
            return len(await self.tokenize(prompt))
        return len(prompt)

    async def _call(
        self, start: Callable[[InferenceServiceAsyncStub], Awaitable[Response]]
    ) -> Response:
        try:
            return await start(self._stub)
        except aio.AioRpcError as error:
            raise from_rpc_error(error, self.address) from None

    def _retry_delay(self, error: aio.AioRpcError, begun: bool, left_s: float) -> float:
        """Seconds to wait before the request is sent again; raises where it must not be."""
        typed: LLMError = from_rpc_error(error, self.address)
        if isinstance(typed, QueueFullError) and typed.retry_after_s is not None and not begun:
            delay = max(typed.retry_after_s, _MIN_RETRY_DELAY_S)
            if delay <= left_s:
                return delay
        raise typed from None
