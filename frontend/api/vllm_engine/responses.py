"""Translates the domain's types into serialized messages of `vllm_engine.proto`.

Messages with many log-probabilities are serialized in pieces, whose bytes are joined. A protobuf
parser merges the occurrences of a field.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from frontend.generation import VLLM_REASONS, CompletionReader, Generation
from frontend.logprobs import LogprobRow
from frontend.text.completion import Delta
from frontend.text.threads import in_pieces
from shared.pb import scheduler_pb2

_ROWS_AT_ONCE = 32


def chunks(
    generation: Generation, completion: CompletionReader, delta: Delta, cached_tokens: int
) -> list[bytes]:
    """Serializes a delta's tokens, each in a message of its own, or a message without tokens.

    smg's parsers of thoughts miss a marker of several tokens ("</think>") of which a message ends
    with a part, unless the message has nothing else.
    """
    message = vllm.GenerateStreamChunk(
        prompt_tokens=len(generation.request.prompt_ids),
        cached_tokens=cached_tokens,
        index=completion.index,
    )
    serialized = []
    for first in range(max(len(delta.token_ids), 1)):
        token_ids = delta.token_ids[first : first + 1]
        message.token_ids[:] = token_ids
        message.completion_tokens = len(token_ids)
        if delta.logprobs:
            message.output_logprobs.CopyFrom(_output_logprobs(delta.logprobs[first : first + 1]))
        serialized.append(vllm.GenerateResponse(chunk=message).SerializeToString())
    return serialized


class Complete:
    """Builds the last message of a completion, which repeats all tokens. If there were no chunks,
    the message also has the tokens' log-probabilities."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._logprobs: list[bytes] = []

    def add(self, delta: Delta, *, logprobs: bool) -> None:
        self._token_ids.extend(delta.token_ids)
        if logprobs and delta.logprobs:
            part = vllm.GenerateComplete(output_logprobs=_output_logprobs(delta.logprobs))
            self._logprobs.append(vllm.GenerateResponse(complete=part).SerializeToString())

    def end(
        self, generation: Generation, completion: CompletionReader, cached_tokens: int
    ) -> bytes:
        """Returns the serialized message. The completion must have ended."""
        ending = completion.ending
        assert ending is not None
        message = vllm.GenerateComplete(
            output_ids=self._token_ids,
            finish_reason=VLLM_REASONS[ending.reason],
            prompt_tokens=len(generation.request.prompt_ids),
            completion_tokens=len(self._token_ids),
            cached_tokens=cached_tokens,
            index=completion.index,
            spec_draft_tokens=completion.stream.num_drafted,
            spec_accepted_tokens=completion.stream.num_accepted,
        )
        if isinstance(ending.stop_reason, int):
            message.matched_token_id = ending.stop_reason
        elif ending.stop_reason is not None:
            message.matched_stop_str = ending.stop_reason
        rest = vllm.GenerateResponse(complete=message).SerializeToString()
        return b"".join((rest, *self._logprobs))


def input_logprobs(
    rows: Sequence[LogprobRow], prompt_ids: Sequence[int], *, streamed: bool
) -> bytes:
    """Serializes the prompt's log-probabilities, to append to the first chunk or to the first
    completion's last message. Run it on a thread, because a long prompt takes a second."""
    pieces = []
    for piece in in_pieces(range(len(rows)), _ROWS_AT_ONCE):
        part = vllm.InputLogProbs(token_ids=[prompt_ids[i] for i in piece])
        for token_ids, values in (rows[i] for i in piece):
            # A prompt's first token follows nothing, so it has no log-probability.
            part.token_logprobs.add(value=values[0] if values else None)
            part.top_logprobs.add(token_ids=token_ids[1:], values=values[1:])
        message = vllm.GenerateResponse()
        (message.chunk if streamed else message.complete).input_logprobs.CopyFrom(part)
        pieces.append(message.SerializeToString())
    return b"".join(pieces)


def _output_logprobs(rows: Sequence[LogprobRow]) -> vllm.OutputLogProbs:
    """One entry per token: the token itself, then the likeliest tokens, which may include it."""
    return vllm.OutputLogProbs(
        token_logprobs=[values[0] for _, values in rows],
        token_ids=[token_ids[0] for token_ids, _ in rows],
        top_logprobs=[
            vllm.TopLogProbs(token_ids=token_ids[1:], values=values[1:])
            for token_ids, values in rows
        ],
    )


class CacheUse(NamedTuple):
    """How much of an engine's KV cache is in use, and how much of the prompts was found in it."""

    used_tokens: int
    max_tokens: int
    usage: float  # 0 to 1
    hit_rate: float | None  # 0 to 1, since the scheduler's start; None: no prompts so far


def cache_use(load: scheduler_pb2.GetLoadResponse, block_size: int) -> CacheUse:
    """Computes the cache's use from a scheduler's load. `block_size` is in tokens."""
    return CacheUse(
        load.blocks_used * block_size,
        load.blocks * block_size,
        load.blocks_used / load.blocks,
        load.cached_prompt_tokens / load.prompt_tokens if load.prompt_tokens else None,
    )


def engine_load(
    rank: int, load: scheduler_pb2.GetLoadResponse, info: scheduler_pb2.EngineInfo
) -> vllm.SchedulerLoad:
    """Translates an engine's load. `rank` is the engine's number among several."""
    cache = cache_use(load, info.block_size)
    return vllm.SchedulerLoad(
        dp_rank=rank,
        num_running_reqs=load.running,
        num_waiting_reqs=load.waiting,
        num_total_reqs=load.running + load.waiting,
        num_used_tokens=cache.used_tokens,
        max_total_num_tokens=cache.max_tokens,
        token_usage=cache.usage,
        gen_throughput=load.tokens_per_s,
        cache_hit_rate=cache.hit_rate,
        utilization=load.running / info.max_num_seqs,
        max_running_requests=info.max_num_seqs,
        num_waiting_uncached_tokens=load.waiting_uncached_tokens,
    )
