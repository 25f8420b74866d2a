"""Decodes messages of `scheduler.proto` into sequences, and encodes outputs."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np

from scheduler_svc.core.admission import MAX_BAD_WORDS
from scheduler_svc.core.client import ANONYMOUS, Client
from scheduler_svc.core.sampling import SamplingParams
from scheduler_svc.core.sequence import FinishCause, Request, Sequence
from scheduler_svc.core.step import End, Output
from shared.errors import InvalidArgumentError
from shared.pb import scheduler_pb2
from shared.sampling_params import NUMBERS, Grammar, Pooling

_ZEROS = [(name, each.zero) for name, each in NUMBERS.items()]


def read_sequence(connection: int, submit: scheduler_pb2.Submit, now: float) -> Sequence:
    """Returns the sequence of the submission's first completion.

    Raises:
        InvalidArgumentError: a column is not an array of its type.
    """
    prompt_ids = _array("i", submit.prompt_ids, "submit.prompt_ids")
    generated_ids = _array("i", submit.generated_ids, "submit.generated_ids")
    request = Request(
        arrival=now,
        deadline=now + submit.timeout_s if submit.timeout_s else None,
        priority=submit.priority,
        cache_salt=submit.cache_salt,
        resubmitted=submit.resubmitted,
        client=_client(submit.client) if submit.client.name else ANONYMOUS,
        traceparent=submit.traceparent,
        num_expected_cached=submit.expected_cached_tokens,
        may_store=not submit.never_store,
    )
    key, params = (connection, submit.request), _sampling_params(submit.sampling)
    return Sequence(key, prompt_ids, params, request, generated_ids=generated_ids)


def _client(client: scheduler_pb2.Client) -> Client:
    return Client(
        client.name,
        client.weight or 1.0,
        client.input_tokens_per_minute,
        client.output_tokens_per_minute,
    )


def _sampling_params(sampling: scheduler_pb2.TokenSampling) -> SamplingParams:
    grammar = sampling.grammar if sampling.HasField("grammar") else None
    bias_ids = _array("i", sampling.bias_ids, "submit.sampling.bias_ids")
    bias_values = _array("f", sampling.bias_values, "submit.sampling.bias_values")
    words = sampling.bad_words[: MAX_BAD_WORDS + 1]  # more are refused anyway
    bad_words = [tuple(_array("i", word, "submit.sampling.bad_words")) for word in words]
    numbers: dict[str, Any] = {name: getattr(sampling, name) or zero for name, zero in _ZEROS}
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        seed=sampling.seed,
        eos_token_ids=frozenset(sampling.eos_token_ids),
        stop_token_ids=frozenset(sampling.stop_token_ids),
        min_tokens=sampling.min_tokens,
        bias_ids=tuple(bias_ids),
        bias_values=tuple(bias_values),
        bad_words=tuple(bad_words),
        logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
        prompt_logprobs=(
            sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None
        ),
        beam_width=sampling.beam_width,
        length_penalty=sampling.length_penalty,
        grammar=grammar and Grammar(grammar.kind, grammar.text),
        pooling=_pooling(sampling.pooling),
        yes_id=sampling.yes_id,
        no_id=sampling.no_id,
        **numbers,
    )


def _pooling(number: int) -> Pooling:
    try:
        return Pooling(number)
    except ValueError as error:
        raise InvalidArgumentError("submit.sampling.pooling", f"{number} is unknown") from error


def _array(code: str, column: bytes, field: str) -> array[Any]:
    """The values of a column, of the type that `array` calls `code`."""
    if len(column) % 4:
        kind = {"i": "int32", "f": "float32"}[code]
        raise InvalidArgumentError(field, f"{len(column)} bytes are not an array of {kind}")
    return array(code, column)


def step_output(outputs: list[Output]) -> scheduler_pb2.StepOutput:
    tokens = [output for output in outputs if output.token is not None]
    first = [o for o in tokens if o.seq.started and o.offset == o.seq.started.offset]
    return scheduler_pb2.StepOutput(
        requests=array("Q", [output.seq.key.number for output in tokens]).tobytes(),
        offsets=array("i", [output.offset for output in tokens]).tobytes(),
        token_ids=np.array([output.token for output in tokens], np.int32).tobytes(),
        started=[_started(output.seq) for output in first],
        finished=[_finished(o.seq, o.end) for o in outputs if o.end is not None],
        logprobs=[rows for output in outputs for rows in _logprobs(output)],
        embeddings=[
            scheduler_pb2.Embedding(request=o.seq.key.number, values=o.embedding.tobytes())
            for o in tokens
            if o.embedding is not None
        ],
    )


def _started(seq: Sequence) -> scheduler_pb2.Started:
    assert seq.started is not None
    return scheduler_pb2.Started(
        request=seq.key.number,
        cached_prompt_tokens=seq.started.num_cached_tokens,
        queue_s=seq.started.at - seq.request.arrival,
    )


def _finished(seq: Sequence, end: End) -> scheduler_pb2.Finished:
    finished = scheduler_pb2.Finished(
        request=seq.key.number,
        cause=scheduler_pb2.FinishCause.ValueType(end.cause),
        message=end.message,
        retry_after_s=end.retry_after_s,
        score=end.score,
        field=end.limit,
    )
    if end.cause is FinishCause.INVALID:  # such messages begin with the field
        finished.field, _, finished.message = end.message.partition(": ")
    return finished


def _logprobs(output: Output) -> list[scheduler_pb2.LogprobRows]:
    return [
        scheduler_pb2.LogprobRows(
            request=output.seq.key.number,
            prompt=logprobs is output.prompt_logprobs,
            first=output.offset,
            width=logprobs.ids.shape[1],
            token_ids=logprobs.ids.tobytes(),
            values=logprobs.values.tobytes(),
        )
        for logprobs in (output.prompt_logprobs, output.logprobs)
        if logprobs is not None
    ]
