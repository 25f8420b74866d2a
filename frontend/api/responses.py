"""Translates the domain's types into the messages of protos/frontend.proto."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from frontend.engines.token_stream import FinishReason
from frontend.generation import CompletionReader, Ending, Totals
from frontend.logprobs import LogprobRow
from frontend.pooled import Pooled
from frontend.scores import Scored
from frontend.text.completion import Delta
from frontend.text.model_files import ModelFacts
from frontend.text.threads import in_pieces
from nano_vllm_grpc.pb import frontend_pb2 as pb
from shared.pb import scheduler_pb2
from shared.sampling_params import NUMBERS

_ROWS_AT_ONCE = 32

# The tag of `GenerateResponse.completions`: its field number and wire type 2 (length-delimited).
_COMPLETION = bytes([pb.GenerateResponse.COMPLETIONS_FIELD_NUMBER << 3 | 2])

_FINISH_REASONS = {
    reason: pb.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in FinishReason
}


def stream_response(
    request_id: str,
    completion: CompletionReader,
    delta: Delta,
    totals: Totals | None,
    table: Mapping[int, bytes],
) -> pb.GenerateStreamResponse:
    """Returns a chunk without the prompt's log-probabilities, which `prompt_logprobs` serializes.

    Args:
        totals: given with the call's last delta only.
        table: the bytes of each token, special ones included.
    """
    response = pb.GenerateStreamResponse(
        request_id=request_id,
        text=delta.text,
        token_ids=delta.token_ids,
        token_offset=delta.offset,
    )
    if completion.index:
        response.index = completion.index
    if delta.logprobs:
        response.logprobs.extend(logprobs(delta.logprobs, table))
    if (ending := completion.ending) is not None:
        response.finish_reason = _FINISH_REASONS[ending.reason]
        response.stop_reason = _stop_reason(ending)
        response.score = ending.score
    if totals is not None:
        response.MergeFrom(pb.GenerateStreamResponse(**_statistics(totals)))
    return response


class WholeCompletion:
    """Joins the deltas of one completion into a serialized message.

    Log-probabilities are serialized as they arrive, because there may be a million messages.
    """

    def __init__(self, index: int, table: Mapping[int, bytes]) -> None:
        """`table`: the bytes of each token, special ones included."""
        self._message = pb.Completion(index=index)
        self._table = table
        self._texts: list[str] = []
        self._logprobs: list[bytes] = []

    def add(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self._message.token_ids.extend(delta.token_ids)
        if delta.logprobs:
            part = pb.Completion(logprobs=logprobs(delta.logprobs, self._table))
            self._logprobs.append(part.SerializeToString())

    def end(self, ending: Ending) -> bytes:
        """Returns the serialized message, with the fields that are known only at the end."""
        self._message.text = "".join(self._texts)
        self._message.finish_reason = _FINISH_REASONS[ending.reason]
        self._message.stop_reason = _stop_reason(ending)
        self._message.score = ending.score
        return b"".join((self._message.SerializeToString(), *self._logprobs))


def whole_response(request_id: str, completions: Sequence[bytes], totals: Totals) -> bytes:
    """Serializes a `GenerateResponse` without the prompt's log-probabilities. `completions`: the
    messages that `WholeCompletion.end` returned."""
    rest = pb.GenerateResponse(request_id=request_id, **_statistics(totals)).SerializeToString()
    return b"".join(
        (rest, *(part for each in completions for part in (_COMPLETION, _varint(len(each)), each)))
    )


async def embed_response(embedded: Pooled) -> pb.EmbedResponse:
    """Makes the message. There may be millions of numbers, so others have their turns meanwhile."""
    response = pb.EmbedResponse(request_id=embedded.request_id, usage=_usage(embedded))
    for vector in embedded.vectors:
        response.embeddings.add().values.extend(vector.tolist())
        await asyncio.sleep(0)
    return response


def score_response(scored: Scored) -> pb.ScoreResponse:
    return pb.ScoreResponse(
        request_id=scored.prompts.request_id,
        scores=scored.probabilities,
        usage=_usage(scored.prompts),
    )


def _usage(pooled: Pooled) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=pooled.prompt_tokens, cached_prompt_tokens=pooled.cached_prompt_tokens
    )


def logprobs(rows: Sequence[LogprobRow], table: Mapping[int, bytes]) -> list[pb.Logprobs]:
    """One message per row, in order. `table`: the bytes of each token, special ones included."""
    return [
        pb.Logprobs(
            entries=[
                pb.Logprob(token_id=token_id, logprob=value, token=table.get(token_id, b""))
                for token_id, value in zip(*row, strict=True)
            ]
        )
        for row in rows
    ]


def prompt_logprobs(
    message: type[pb.GenerateResponse | pb.GenerateStreamResponse],
    rows: Sequence[LogprobRow],
    table: Mapping[int, bytes],
) -> bytes:
    """Serializes a `message` that has only the prompt's log-probabilities. Append its bytes to
    another message's. Run it on a thread, because a long prompt takes a second."""
    return b"".join(
        message(prompt_logprobs=logprobs(piece, table)).SerializeToString()
        for piece in in_pieces(rows, _ROWS_AT_ONCE)
    )


def _stop_reason(ending: Ending) -> str:
    return "" if ending.stop_reason is None else str(ending.stop_reason)


def _statistics(totals: Totals) -> dict[str, Any]:
    usage = pb.Usage(
        prompt_tokens=totals.prompt_tokens,
        cached_prompt_tokens=totals.cached_prompt_tokens,
        completion_tokens=totals.completion_tokens,
    )
    timings = pb.Timings(
        queue_s=totals.queue_s, first_token_s=totals.first_token_s, total_s=totals.total_s
    )
    return {"usage": usage, "timings": timings}


def model(facts: ModelFacts, info: scheduler_pb2.EngineInfo) -> pb.GetModelResponse:
    return pb.GetModelResponse(
        model=facts.name,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        eos_token_ids=facts.eos_token_ids,
        default_sampling=pb.SamplingParams(
            **{name: getattr(facts.defaults, name) for name, p in NUMBERS.items() if p.from_model}
        ),
        capacity=pb.EngineCapacity(
            num_blocks=info.num_blocks,
            block_size=info.block_size,
            max_num_seqs=info.max_num_seqs,
            max_num_batched_tokens=info.max_num_batched_tokens,
            max_waiting=info.max_waiting,
            tensor_parallel_size=info.tensor_parallel_size,
            pipeline_parallel_size=info.pipeline_parallel_size,
        ),
    )


def _varint(value: int) -> bytes:
    """Encodes `value` as in https://protobuf.dev/programming-guides/encoding#varints"""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*encoded, value))
