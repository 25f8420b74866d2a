"""The client for asyncio programs. `nano_vllm_grpc.LLM` wraps it in plain calls."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Self, TypeVar, Unpack, cast

from nano_vllm_grpc import wire
from nano_vllm_grpc.calls import Calls, seconds_until
from nano_vllm_grpc.connections import Connections, split_addresses
from nano_vllm_grpc.pb import frontend_pb2 as pb
from nano_vllm_grpc.progress import Progress
from nano_vllm_grpc.resume import ResumableRequest
from nano_vllm_grpc.tls import ClientTls as TLS
from nano_vllm_grpc.types import (
    Chat,
    Chunk,
    Completion,
    GenerateOptions,
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

Result = TypeVar("Result")

_INPUTS_OF_CALL = 64  # to embed or to score
_BYTES_OF_CALL = 2 << 20  # of these, well below the limit of a message
_MAX_BYTES_OF_UNIT = 5  # of a token id; a character has up to 4


class AsyncLLM:
    """A connection to a server, for one event loop.

        async with AsyncLLM("127.0.0.1:50051") as llm:
            async for chunk in llm.stream("Once upon a time"):
                print(chunk.text, end="")

    If a server goes away, or says when to retry, the request is sent again, to another server if
    there is one. A broken stream resumes after the tokens received, without an error, a gap or a
    repetition. Every method may raise `nano_vllm_grpc.errors.LLMError`.

    Args:
        address: `host:port` or `unix:path` of a frontend, or of several, as a list or separated by
            commas.
        connections: maximum number per address. A server takes 1,024 calls on each. Each reaches
            one of the frontends that share a port.
        max_in_flight: number of requests that `generate` has open at a time; the others wait here.
        max_retry_wait_s: how long a request may wait for a server that is away or full, counted
            from its first failure since it last received anything.
        tls: how to verify the server; by default from NANO_TLS_CA, NANO_CLIENT_CERT,
            NANO_CLIENT_KEY and NANO_TLS_SERVER_NAME, or plaintext if none of them is set.
        token: bearer token; by default NANO_TOKEN.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        connections: int = 4,
        max_in_flight: int = 512,
        max_retry_wait_s: float = 300.0,
        tls: TLS | None = None,
        token: str | None = None,
    ) -> None:
        addresses = split_addresses(address)
        self.address = ",".join(addresses)
        self._max_in_flight = max_in_flight
        self._connections = Connections(addresses, connections, tls, token)
        self._calls = Calls(self._connections, max_retry_wait_s)

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        resume_token_ids: Sequence[int] | Sequence[Sequence[int]] = (),
        **options: Unpack[GenerateOptions],
    ) -> list[Completion]:
        """Returns completions in the order of the prompts, `n` or `beam_width` for each if set.

        Up to `max_in_flight` prompts are sent at once. The first error cancels the other requests
        and is raised.

        Args:
            prompts: one prompt or a list of them, each a text, token ids, or a chat.
            sampling_params: one for all prompts, or one per prompt.
            use_tqdm: show progress with prefill and decode tokens/s on stderr.
            resume_token_ids: the tokens that the completion already has and resumes after. Give a
                list of such lists for several prompts.
            options: timeout_s, priority, cache_salt and store, see `GenerateOptions`.
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
                prompt_tokens = await self._count_tokens(prompt) if progress.shown else 0
                with progress.request(prompt_tokens) as received:
                    stream = self.stream(prompt, each, resume_token_ids=resume, **options)
                    return await _complete(stream, received)

        each_one = zip(items, params, resumed, strict=True)
        try:
            results = await _gather([run(*arguments) for arguments in each_one])
        finally:
            progress.close()
        return [completion for completions in results for completion in completions]

    async def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        **options: Unpack[GenerateOptions],
    ) -> list[Completion]:
        """Returns the answers to one conversation or a list of them. `generate` and `stream` take a
        `Chat` instead.

        Args:
            tools, chat_template_kwargs, continue_final_message: as in `Chat`, for all chats.
            sampling_params, use_tqdm, options: as for `generate`.
        """
        chats = [
            Chat(
                cast(Sequence[Message], each),
                tools or (),
                chat_template_kwargs or {},
                continue_final_message,
            )
            for each in as_prompts(messages)
        ]
        return await self.generate(chats, sampling_params, use_tqdm, **options)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        timeout_s: float | None = None,
        priority: int = 0,
        cache_salt: str = "",
        store: bool = True,
        resume_token_ids: Sequence[int] = (),
    ) -> AsyncGenerator[Chunk, None]:
        """Yields a completion's chunks as they arrive. Several completions are interleaved.
        Closing the iterator (`aclose`, or cancelling the task that waits for it) cancels the
        request.

        Args:
            timeout_s, priority, cache_salt, store: see `GenerateOptions`.
            resume_token_ids: the tokens that the completion already has and resumes after.
        """
        params = sampling_params or SamplingParams()
        message = wire.encode_request(
            prompt, params, priority, cache_salt, resume_token_ids, store=store
        )
        return self._calls.stream(ResumableRequest(message, timeout_s))

    async def embed(
        self,
        prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        dimensions: int = 0,
        *,
        timeout_s: float | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> list[list[float]]:
        """Returns the embeddings of prompts in their order, each of length 1.

        Args:
            prompts: one prompt or a list of them, each a text or token ids.
            dimensions: how many of the first dimensions to return; 0: all.
            timeout_s: for all prompts together.
            priority, cache_salt: see `RequestOptions`.
        """
        items = cast(list[str | Sequence[int]], as_prompts(prompts))

        async def embed(part: slice, deadline: float) -> list[list[float]]:
            with wire.encoding():
                request = pb.EmbedRequest(
                    inputs=map(wire.encode_input, items[part]),
                    dimensions=dimensions,
                    priority=priority,
                    cache_salt=cache_salt,
                )
            answer = await self._calls.unary(
                lambda stub: stub.Embed(request, timeout=seconds_until(deadline)), deadline
            )
            return [list(each.values) for each in answer.embeddings]

        return await self._in_parts([len(each) for each in items], embed, timeout_s)

    async def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        instruction: str = "",
        *,
        timeout_s: float | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> list[float]:
        """Returns how relevant each document is to its query, from 0 to 1, in their order.

        Args:
            queries: one for all documents, or one for each.
            instruction: what makes a document relevant; empty: the model's default.
            timeout_s: for all documents together.
            priority, cache_salt: see `RequestOptions`.

        Raises:
            ValueError: there are several queries, but not one for each document.
        """
        documents = [documents] if isinstance(documents, str) else documents
        queries = [queries] if isinstance(queries, str) else queries
        if len(queries) not in (1, len(documents)):
            raise ValueError(f"{len(queries)} queries for {len(documents)} documents")
        lengths = [len(each) for each in documents]
        if len(queries) > 1:
            lengths = [len(query) + length for query, length in zip(queries, lengths, strict=True)]

        async def score(part: slice, deadline: float) -> list[float]:
            own = queries if len(queries) == 1 else queries[part]
            with wire.encoding():
                request = pb.ScoreRequest(
                    queries=own,
                    documents=documents[part],
                    instruction=instruction,
                    priority=priority,
                    cache_salt=cache_salt,
                )
            answer = await self._calls.unary(
                lambda stub: stub.Score(request, timeout=seconds_until(deadline)), deadline
            )
            return list(answer.scores)

        return await self._in_parts(lengths, score, timeout_s)

    async def _in_parts(
        self,
        lengths: Sequence[int],
        send: Callable[[slice, float], Coroutine[Any, Any, list[Result]]],
        timeout_s: float | None,
    ) -> list[Result]:
        """Sends parts of a list of inputs of these lengths, several at a time, with a common
        deadline. Returns their results, in order."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        at_once = min(_INPUTS_OF_CALL, self._max_in_flight)
        slots = asyncio.Semaphore(self._max_in_flight // at_once)

        async def run(part: slice) -> list[Result]:
            async with slots:
                return await send(part, deadline)

        found = await _gather([run(part) for part in _parts(lengths, at_once)])
        return [each for part in found for each in part]

    async def tokenize(self, prompt: str | Sequence[Message] | Chat) -> list[int]:
        """Returns the token ids of a text, or of a chat as the model's template renders it."""
        request = wire.encode_tokenize(prompt)
        return list((await self._calls.unary(lambda stub: stub.Tokenize(request))).token_ids)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        with wire.encoding():
            request = pb.DetokenizeRequest(token_ids=token_ids)
        return (await self._calls.unary(lambda stub: stub.Detokenize(request))).text

    async def get_model(self) -> ModelInfo:
        """Describes the model that the server serves, and its limits."""
        request = pb.GetModelRequest()
        return wire.decode_model(await self._calls.unary(lambda stub: stub.GetModel(request)))

    async def close(self) -> None:
        """Ends the connections and cancels requests in progress."""
        await self._connections.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _count_tokens(self, prompt: Prompt) -> int:
        if isinstance(prompt, str) or is_chat(prompt):
            return len(await self.tokenize(prompt))
        return len(cast(Sequence[int], prompt))


async def _gather(works: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """The results of works that run side by side. The first error cancels the others."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _parts(lengths: Sequence[int], count: int) -> Iterator[slice]:
    """Yields up to `count` inputs at a time, fewer if they are long."""
    start, size = 0, 0
    for end, length in enumerate(lengths):
        num_bytes = _MAX_BYTES_OF_UNIT * length
        if end > start and (end - start == count or size + num_bytes > _BYTES_OF_CALL):
            yield slice(start, end)
            start, size = end, 0
        size += num_bytes
    if start < len(lengths):
        yield slice(start, len(lengths))


async def _complete(
    stream: AsyncGenerator[Chunk, None], received: Callable[[int], None]
) -> list[Completion]:
    """Joins the completions of a stream; calls `received` with each chunk's number of tokens."""
    chunks: dict[int, list[Chunk]] = {}
    prompt_logprobs: list[dict[int, float]] = []
    async with aclosing(stream):
        async for chunk in stream:
            received(len(chunk.token_ids))
            chunks.setdefault(chunk.index, []).append(chunk)
            prompt_logprobs += chunk.prompt_logprobs
    return [join(chunks[index], chunk, prompt_logprobs) for index in sorted(chunks)]
