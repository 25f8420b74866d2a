"""The frontend's interface by vLLM's engine protocol."""

from __future__ import annotations

import asyncio
from typing import Any

from frontend.api.vllm_engine.servicer import SERVICE_NAME
from google.protobuf.message import Message
from grpc import aio
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from tests.fuzz.corpus import Case
from tests.fuzz.harness import Shares
from tests.fuzz.tally import Tally, send
from tests.fuzz.values import CANARY

_ENDLESS = "SubscribeKvEvents"  # lasts for as long as others generate
_ENOUGH_S = 0.5


async def send_case(channel: aio.Channel, case: Case, tally: Tally) -> None:
    """Sends a case's messages, each in a call of its own."""
    path = f"/{SERVICE_NAME}/{case.method}"
    for message in case.messages:
        try:
            async with asyncio.timeout(_ENOUGH_S if case.method == _ENDLESS else None):
                await send(channel, path, message, tally, case)
        except TimeoutError:
            tally.counts["left"] += 1


def _request(**fields: Any) -> vllm.GenerateRequest:
    sampling = {"max_tokens": 4, "skip_special_tokens": True, **fields.pop("sampling", {})}
    fields = {"tokenized": _IDS, **fields} if "text" not in fields else fields
    return vllm.GenerateRequest(sampling_params=vllm.SamplingParams(**sampling), **fields)


_IDS = vllm.TokenizedInput(original_text=CANARY, input_ids=[1, 2, 3])
_ALL = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 9,
    "min_p": 0.1,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.2,
    "min_tokens": 2,
    "stop_token_ids": [9],
    "seed": -7,
    "logprobs": 2,
    "prompt_logprobs": 1,
    "logit_bias": {3: 2.0, 4: -2.0},
    "truncate_prompt_tokens": 2,
    "include_stop_str_in_output": True,
}
_CONSTRAINTS: list[dict[str, Any]] = [
    {"regex": "[a-z]{2,5}"},
    {"json_schema": '{"type": "integer"}'},
    {"grammar": 'root ::= "a" | "b" root'},
    {"structural_tag": '{"type": "structural_tag", "format": {"type": "any_text"}}'},
    {"json_object": True},
    {"choice": vllm.ChoiceConstraint(choices=["yes", "no"])},
]
_GENERATE: list[Message] = [
    _request(request_id="a"),
    _request(text=CANARY, stream=True),
    _request(text=CANARY, request_id="a", sampling={"n": 3, "stop": ["a", "the"]}),
    _request(stream=True, sampling=_ALL),
    _request(sampling=_ALL),
    *(_request(sampling=each) for each in _CONSTRAINTS),
]
_OTHERS: dict[str, Message] = {
    "Abort": vllm.AbortRequest(request_ids=["a", CANARY]),
    "Embed": vllm.EmbedRequest(request_id="a", tokenized=_IDS),
    "HealthCheck": vllm.HealthCheckRequest(),
    "GetModelInfo": vllm.GetModelInfoRequest(),
    "GetServerInfo": vllm.GetServerInfoRequest(),
    "GetLoads": vllm.GetLoadsRequest(),
    "GetTokenizer": common.GetTokenizerRequest(),
    "SubscribeKvEvents": common.SubscribeKvEventsRequest(start_sequence_number=0),
}
SHARES: Shares = [
    ("Generate", _GENERATE, 2 * len(_OTHERS)),
    *((method, [example], 1) for method, example in _OTHERS.items()),
]
