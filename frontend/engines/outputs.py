"""Passes the outputs of an engine's steps to the streams of the completions."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import structlog

from frontend.engines.ledger import Ledger
from frontend.engines.messages import finish_of, logprob_rows, new_tokens
from frontend.engines.token_stream import FinishReason, Start, TokenStream
from frontend.metrics import RequestMetrics
from shared.errors import QueueFullError
from shared.pb import scheduler_pb2 as pb

log = structlog.get_logger(__name__)

_LOGPROBS_AT_ONCE = 1 << 14  # in one iteration of the event loop


class Outputs:
    """Applies step outputs to the completions in `ledger`."""

    def __init__(self, ledger: Ledger, metrics: RequestMetrics) -> None:
        self._ledger = ledger
        self._metrics = metrics

    async def take_logprobs(self, output: pb.StepOutput) -> None:
        """Adds a step's log-probabilities to the streams, a few at a time, because a step may score
        thousands of tokens. Call it before `take_tokens`, so that every token has its own."""
        num_entries = 0
        for rows in output.logprobs:
            self._take_rows(rows)
            num_entries += len(rows.token_ids) // 4
            if num_entries > _LOGPROBS_AT_ONCE:
                await asyncio.sleep(0)
                num_entries = 0

    def take_embeddings(self, output: pb.StepOutput) -> None:
        """Gives a step's embeddings to the streams. Call it before `take_tokens`."""
        for embedding in output.embeddings:
            if entry := self._ledger.entries.get(embedding.request):
                entry.stream.embedding = np.frombuffer(embedding.values, "<f4")

    def take_tokens(self, output: pb.StepOutput) -> list[TokenStream]:
        """Appends a step's tokens. Returns the completions that have missing tokens.

        It makes one pass over plain lists and one wake-up per request, without a task or an await
        per token.
        """
        grown: set[TokenStream] = set()
        gaps: dict[TokenStream, int] = {}
        entries, observe = self._ledger.entries, self._metrics.inter_token_latency.observe
        now = time.monotonic()
        for number, offset, token_id in new_tokens(output):
            entry = entries.get(number)
            if entry is None or offset < len(entry.stream.tokens):
                continue  # closed in the meantime, or a token received before
            stream = entry.stream
            if offset > len(stream.tokens):
                gaps.setdefault(stream, offset)
                continue
            if stream.last_token_at is not None:
                observe(now - stream.last_token_at)
            stream.append(token_id, now)
            grown.add(stream)
        for started in output.started:
            entry = entries.get(started.request)
            if entry is None:
                continue
            self._ledger.settle(entry)
            if entry.stream.start is None:
                queue_s = entry.stream.withheld_s + started.queue_s
                entry.stream.start = Start(started.cached_prompt_tokens, queue_s)
                self._metrics.queue_time.observe(queue_s)
        for stream in grown:
            stream.waiter.wake()
        for stream, offset in gaps.items():
            log.error(
                "tokens are missing in a step; failing the request",
                request_id=stream.request.request_id,
                expected_offset=len(stream.tokens),
                offset=offset,
            )
        return [*gaps]

    def take_ends(self, output: pb.StepOutput) -> list[tuple[TokenStream, QueueFullError]]:
        """Ends completions. Returns those that the engine has no room for, which have not ended."""
        rejected = []
        for finished in output.finished:
            stream = self._ledger.remove(finished.request)
            if stream is not None:
                end = finish_of(finished, stream.request.request_id)
                if isinstance(end, FinishReason):
                    stream.complete(end, finished.score)
                elif isinstance(end, QueueFullError):
                    rejected.append((stream, end))
                else:
                    stream.fail(end)
        return rejected

    def _take_rows(self, rows: pb.LogprobRows) -> None:
        entry = self._ledger.entries.get(rows.request)
        if entry is None:
            return
        stream = entry.stream
        logprobs = stream.prompt_logprobs if rows.prompt else stream.logprobs
        if logprobs is not None:
            logprobs.add(rows.first, logprob_rows(rows))
            if rows.prompt:
                stream.waiter.wake()  # tokens of other completions may be waiting for them
