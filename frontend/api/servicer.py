"""The public gRPC service: text in, text out."""

from __future__ import annotations

import asyncio

from frontend import validation
from frontend.api import responses
from frontend.api.responses import WholeCompletion, stream_response
from frontend.embeddings import embed
from frontend.generation import Generation
from frontend.generations import Generations
from frontend.scores import score_documents
from frontend.text.completion import Delta
from nano_vllm_grpc.pb import frontend_pb2 as pb
from nano_vllm_grpc.pb.frontend_pb2_grpc import InferenceServiceServicer
from shared.errors import InvalidArgumentError
from shared.rpc.interceptors import Context

SERVICE_NAME = "nanovllm.v1.InferenceService"


class InferenceServicer(InferenceServiceServicer):
    """Serves `frontend.proto` for one model."""

    def __init__(self, generations: Generations) -> None:
        self._generations = generations
        self._tokenizer = generations.tokenizer

    async def Generate(  # type: ignore[override]  # serialized already
        self, request: pb.GenerateRequest, context: Context
    ) -> bytes:
        generation = await self._start(request, context)
        del request
        wholes = [
            WholeCompletion(index, self._tokenizer.vocabulary.tokens)
            for index in range(generation.request.sampling.num_completions)
        ]
        prompt = b""
        while not generation.ended:
            for completion, delta in await generation.next_deltas():
                wholes[completion.index].add(delta)
                if delta.logprobs:
                    await asyncio.sleep(0)
                if delta.prompt_logprobs:
                    prompt = await self._prompt_logprobs(pb.GenerateResponse, delta)
        completions = [
            whole.end(ending) for whole, ending in zip(wholes, generation.endings, strict=True)
        ]
        request_id, totals = generation.request.request_id, generation.totals()
        return responses.whole_response(request_id, completions, totals) + prompt

    async def GenerateStream(  # type: ignore[override]  # writing takes less work than yielding
        self, request: pb.GenerateRequest, context: Context
    ) -> None:
        generation = await self._start(request, context)
        del request
        request_id, table = generation.request.request_id, self._tokenizer.vocabulary.tokens
        while not generation.ended:
            deltas = await generation.next_deltas()
            for completion, delta in deltas:
                last = generation.ended and delta is deltas[-1][1]
                totals = generation.totals() if last else None
                response = stream_response(request_id, completion, delta, totals, table)
                if delta.prompt_logprobs:
                    prompt = await self._prompt_logprobs(pb.GenerateStreamResponse, delta)
                    await context.write(response.SerializeToString() + prompt)
                else:
                    await context.write(response)

    async def _start(self, request: pb.GenerateRequest, context: Context) -> Generation:
        generation = await self._generations.start(request, context.time_remaining())

        def on_done(_: object) -> None:
            # Runs however the call ends, even if the client goes away while a chunk is written.
            generation.close()

        context.add_done_callback(on_done)  # type: ignore[arg-type]  # grpc's stubs want a class
        return generation

    async def _prompt_logprobs(
        self, message: type[pb.GenerateResponse | pb.GenerateStreamResponse], delta: Delta
    ) -> bytes:
        """Serializes a delta's `prompt_logprobs` and removes them from the delta."""
        rows, delta.prompt_logprobs = delta.prompt_logprobs, ()
        table = self._tokenizer.vocabulary.tokens
        return await self._tokenizer.on_thread(
            lambda: responses.prompt_logprobs(message, rows, table)
        )

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:
        embedded = await embed(self._generations, request, context.time_remaining())
        return await responses.embed_response(embedded)

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:
        scored = await score_documents(self._generations, request, context.time_remaining())
        return responses.score_response(scored)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        token_ids = await self._generations.encode(request, validation.MAX_TOKENIZED)
        return pb.TokenizeResponse(token_ids=token_ids)

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: Context
    ) -> pb.DetokenizeResponse:
        count, limit = len(request.token_ids), validation.MAX_TOKENIZED
        if count > limit:
            raise InvalidArgumentError("token_ids", f"{count} tokens; the limit is {limit}")
        token_ids = list(request.token_ids)  # faster than iterating over the field even once
        validation.check_token_ids("token_ids", token_ids, self._generations.facts.vocab_size)
        return pb.DetokenizeResponse(text=await self._tokenizer.decode(token_ids))

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        return responses.model(self._generations.facts, self._generations.engines.engine_info)
