"""Valid messages from a frontend to the scheduler, covering all that a request can ask for."""

from __future__ import annotations

from typing import Any

from shared.pb import scheduler_pb2 as pb
from tests.fuzz.values import CANARY
from tests.worker_svc.harness import f4, i4

TOKENS = 6  # in a completion


def abort(request: int) -> bytes:
    return pb.FrontendMessage(abort=pb.Abort(request=request)).SerializeToString()


def submit(request: int, prompt: list[int], priority: int = 0, **sampling: Any) -> bytes:
    params = pb.TokenSampling(**{"max_tokens": TOKENS, **sampling})
    submit = pb.Submit(request=request, prompt_ids=i4(prompt), priority=priority, sampling=params)
    return pb.FrontendMessage(submit=submit).SerializeToString()


def _example(**fields: Any) -> pb.FrontendMessage:
    sampling = pb.TokenSampling(**{"max_tokens": 5, **fields.pop("sampling", {})})
    fields = {"request": 3, "prompt_ids": i4([1, 2, 3, 4, 5]), **fields}
    return pb.FrontendMessage(submit=pb.Submit(sampling=sampling, **fields))


EXAMPLES = [
    _example(),
    _example(generated_ids=i4([7, 8]), resubmitted=True, timeout_s=20.0, traceparent=CANARY),
    _example(priority=-1, cache_salt=CANARY, request_id=CANARY, n=4),
    _example(
        client=pb.Client(
            name=CANARY, weight=2, input_tokens_per_minute=100, output_tokens_per_minute=1
        )
    ),
    _example(sampling={"beam_width": 3, "length_penalty": 1.0, "eos_token_ids": [8]}),
    _example(
        sampling={
            "temperature": 0.7,
            "seed": 5,
            "eos_token_ids": [9],
            "stop_token_ids": [10, 11],
            "min_tokens": 2,
            "top_k": 4,
            "top_p": 0.5,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "presence_penalty": 0.1,
            "frequency_penalty": 0.1,
            "bias_ids": i4([1, 2]),
            "bias_values": f4([0.5, -1.0]),
            "bad_words": [i4([3]), i4([4, 5])],
            "logprobs": 2,
            "prompt_logprobs": 1,
        }
    ),
    *[
        _example(sampling={"eos_token_ids": [2], "grammar": pb.Grammar(kind=kind, text=text)})
        for kind, text in (
            (pb.GRAMMAR_KIND_JSON_SCHEMA, '{"type": "integer"}'),
            (pb.GRAMMAR_KIND_REGEX, "[a-z]{2,5}"),
            (pb.GRAMMAR_KIND_EBNF, 'root ::= "a" | "b" root'),
            (pb.GRAMMAR_KIND_JSON, ""),
        )
    ],
    pb.FrontendMessage(abort=pb.Abort(request=3)),
]
