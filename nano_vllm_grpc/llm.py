"""The client for programs without asyncio."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import weakref
from collections.abc import Coroutine, Generator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Self, TypeVar, Unpack

from nano_vllm_grpc.async_llm import AsyncLLM
from nano_vllm_grpc.private_stack import PrivateStack
from nano_vllm_grpc.tls import ClientTls as TLS
from nano_vllm_grpc.types import (
    Chat,
    Chunk,
    Completion,
    GenerateOptions,
    Message,
    ModelInfo,
    Prompt,
    RequestOptions,
    SamplingParams,
)

Result = TypeVar("Result")

_CLOSE_TIMEOUT_S = 5.0


class LLM:
    """A connection to a server, or to a private stack that it starts and stops.

        llm = LLM("127.0.0.1:50051")
        llm = LLM(model="models/demo", max_num_seqs=64)

    Usable from several threads. Every method may raise `nano_vllm_grpc.errors.LLMError`.

    Args:
        address: `host:port` or `unix:path` of a frontend, or of several, as for `AsyncLLM`; without
            one, `model` is required.
        model: directory of the model to start a private stack with.
        connections, max_in_flight, max_retry_wait_s, tls, token: as for `AsyncLLM`.
        variables: of the private stack. They are those of `make up`, in lower case. vLLM's
            `tensor_parallel_size`, `gpu_memory_utilization` and `enforce_eager` are accepted, too.
    """

    def __init__(
        self,
        address: str | Sequence[str] | None = None,
        *,
        model: str | os.PathLike[str] | None = None,
        connections: int = 4,
        max_in_flight: int = 512,
        max_retry_wait_s: float = 300.0,
        tls: TLS | None = None,
        token: str | None = None,
        **variables: object,
    ) -> None:
        self._stack: PrivateStack | None = None
        if address is None:
            if model is None:
                raise TypeError("give the address of a server, or model= to start a private stack")
            self._stack = PrivateStack(model, **variables)
            address = self._stack.address
        elif model is not None or variables:
            raise TypeError("model= and variables start a private stack; give them or an address")
        self._llm = AsyncLLM(
            address,
            connections=connections,
            max_in_flight=max_in_flight,
            max_retry_wait_s=max_retry_wait_s,
            tls=tls,
            token=token,
        )
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, name="llm-client", daemon=True)
        thread.start()
        self._finalizer = weakref.finalize(self, _close, self._llm, self._loop, thread)

    @property
    def address(self) -> str:
        return self._llm.address

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        resume_token_ids: Sequence[int] | Sequence[Sequence[int]] = (),
        **options: Unpack[GenerateOptions],
    ) -> list[Completion]:
        """Returns completions in the order of the prompts, as `AsyncLLM.generate` does."""
        return self._run(
            self._llm.generate(
                prompts, sampling_params, use_tqdm, resume_token_ids=resume_token_ids, **options
            )
        )

    def chat(
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
        """Returns the answers to one conversation or a list of them, as `AsyncLLM.chat` does."""
        return self._run(
            self._llm.chat(
                messages,
                sampling_params,
                use_tqdm,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
                continue_final_message=continue_final_message,
                **options,
            )
        )

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        resume_token_ids: Sequence[int] = (),
        **options: Unpack[GenerateOptions],
    ) -> Generator[Chunk, None, None]:
        """Yields a completion's chunks as they arrive, as `AsyncLLM.stream` does. Closing the
        generator cancels the request."""
        chunks: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()
        stream = self._llm.stream(
            prompt, sampling_params, resume_token_ids=resume_token_ids, **options
        )

        async def pump() -> None:
            try:
                async for chunk in stream:
                    chunks.put(chunk)
            finally:
                chunks.put(None)

        pumping = self._submit(pump())
        try:
            while (chunk := chunks.get()) is not None:
                yield chunk
            pumping.result()
        finally:
            pumping.cancel()

    def embed(
        self,
        prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        dimensions: int = 0,
        **options: Unpack[RequestOptions],
    ) -> list[list[float]]:
        """Returns the embeddings of one prompt or a list of them, as `AsyncLLM.embed` does."""
        return self._run(self._llm.embed(prompts, dimensions, **options))

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        instruction: str = "",
        **options: Unpack[RequestOptions],
    ) -> list[float]:
        """Returns how relevant each document is to its query, as `AsyncLLM.score` does."""
        return self._run(self._llm.score(queries, documents, instruction, **options))

    def tokenize(self, prompt: str | Sequence[Message] | Chat) -> list[int]:
        """Returns the token ids of a text, or of a chat as the model's template renders it."""
        return self._run(self._llm.tokenize(prompt))

    def detokenize(self, token_ids: Sequence[int]) -> str:
        return self._run(self._llm.detokenize(token_ids))

    def get_model(self) -> ModelInfo:
        """Describes the model that the server serves, and its limits."""
        return self._run(self._llm.get_model())

    def close(self) -> None:
        """Ends the connections, and the private stack if there is one. Also happens at exit."""
        self._finalizer()
        if self._stack is not None:
            self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        if not self._finalizer.alive:
            work.close()
            raise RuntimeError("this LLM is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        future = self._submit(work)
        try:
            return future.result()
        finally:
            future.cancel()  # the requests must not continue if the wait was interrupted


def _close(llm: AsyncLLM, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    async def end() -> None:
        await llm.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await loop.shutdown_asyncgens()

    if threading.current_thread() is not thread:  # a thread that collects it cannot wait for itself
        asyncio.run_coroutine_threadsafe(end(), loop).result(_CLOSE_TIMEOUT_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(_CLOSE_TIMEOUT_S)
    loop.close()
