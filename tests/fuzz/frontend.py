"""The frontend's public API."""

from __future__ import annotations

from typing import Any

from nano_vllm_grpc.pb import frontend_pb2 as pb
from tests.fuzz.harness import Shares
from tests.fuzz.values import CANARY


def _request(**fields: object) -> pb.GenerateRequest:
    sampling = fields.pop("sampling", {})
    assert isinstance(sampling, dict)
    params = pb.SamplingParams(**{"max_tokens": 4, **sampling})
    return pb.GenerateRequest(sampling=params, **fields)  # type: ignore[arg-type]


_IDS = pb.TokenIds(ids=[1, 2, 3])
_CHAT = pb.Chat(messages=[pb.ChatMessage(role="user", content=CANARY)])
_CALL = pb.ToolCall(id="1", function=pb.FunctionCall(name="f", arguments='{"a": [{"b": 1}]}'))
_TOOLS = pb.Chat(
    messages=[
        pb.ChatMessage(role="user", content=CANARY),
        pb.ChatMessage(role="assistant", reasoning_content=CANARY, tool_calls=[_CALL]),
        pb.ChatMessage(role="tool", content=CANARY, name="f", tool_call_id="1"),
        pb.ChatMessage(role="assistant", content="It"),
    ],
    tools=['{"type": "function", "function": {"name": "f", "parameters": {"a": {}}}}'],
    chat_template_kwargs='{"enable_thinking": false}',
    continue_final_message=True,
)
_STRUCTURED: list[dict[str, Any]] = [
    {"regex": "[a-z]{2,5}"},
    {"json_schema": '{"type": "integer"}'},
    {"grammar": 'root ::= "a" | "b" root'},
    {"choice": pb.Choice(options=["yes", "no"])},
]
_GENERATE = [
    _request(text=CANARY),
    _request(token_ids=_IDS, priority=-3, cache_salt="salt", request_id="name"),
    _request(chat=_CHAT, sampling={"stop": ["a", "the"], "seed": 7, "stop_token_ids": [9]}),
    _request(token_ids=_IDS, resume_token_ids=[4, 5], sampling={"temperature": 0}),
    _request(token_ids=_IDS, sampling={"n": 3, "temperature": 1, "logprobs": 2}),
    _request(token_ids=_IDS, sampling={"beam_width": 3, "length_penalty": 0.5}),
    _request(
        token_ids=_IDS,
        sampling={
            "top_k": 9,
            "top_p": 0.9,
            "min_p": 0.1,
            "repetition_penalty": 1.2,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.5,
            "logit_bias": {3: 2.0, 4: -2.0},
            "bad_words": ["the", "once upon"],
            "min_tokens": 2,
            "prompt_logprobs": 1,
            "skip_special_tokens": False,
        },
    ),
    *(
        _request(token_ids=_IDS, sampling={"structured_output": pb.StructuredOutput(**kind)})
        for kind in _STRUCTURED
    ),
]
_TOKENIZE = [
    pb.TokenizeRequest(text=CANARY),
    pb.TokenizeRequest(chat=_CHAT),
    pb.TokenizeRequest(chat=_TOOLS),
]
SHARES: Shares = [
    ("Tokenize", _TOKENIZE, 8),
    ("Detokenize", [pb.DetokenizeRequest(token_ids=[1, 2, 3, 500])], 8),
    ("GetModel", [pb.GetModelRequest()], 2),
    ("GenerateStream", _GENERATE, 41),
    ("Generate", _GENERATE, 41),
]
