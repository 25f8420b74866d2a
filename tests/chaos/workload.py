"""The distinct requests of a campaign: each is greedy or has a seed, so that it has one answer."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace

from nano_vllm_grpc.types import Prompt, SamplingParams, StructuredOutput

_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["fox", "hen"]},
        "legs": {"type": "array", "items": {"type": "integer"}, "minItems": 5, "maxItems": 5},
    },
    "required": ["name", "legs"],
    "additionalProperties": False,
}
_STORIES = ("Once upon a time, there was a little fox who", "One day a hen", "In the wood", "The")
_VOCABULARY = 1500  # of the demo model, without the special tokens

# Drawn in turn, so that even a short campaign covers all of them.
_FEATURES: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0),
    "seeded": SamplingParams(temperature=1.0),
    "filters": SamplingParams(temperature=1.3, top_k=40, top_p=0.9, min_p=0.02),
    "penalties": SamplingParams(temperature=0.8, repetition_penalty=1.2, presence_penalty=0.5),
    "logprobs": SamplingParams(temperature=1.0, logprobs=2, prompt_logprobs=1),
    "bias": SamplingParams(temperature=1.0, logit_bias={300: 4.0}, min_tokens=10),
    "several": SamplingParams(temperature=1.0, n=3),
    "beams": SamplingParams(beam_width=2),
    "stop": SamplingParams(temperature=1.0, stop=["and the", "zebra"]),
    "schema": SamplingParams(structured_output=StructuredOutput(json_schema=json.dumps(_SCHEMA))),
    "regex": SamplingParams(structured_output=StructuredOutput(regex=r"(yes|no)(, [a-z]{3,6}){6}")),
}
_NO_SEED = ("greedy", "beams")
_ENDS_BY_ITSELF = ("stop", "schema", "regex")


@dataclass(frozen=True)
class Request:
    """A request, named after its feature."""

    name: str
    prompt: Prompt
    params: SamplingParams


def draw_requests(rng: random.Random, count: int) -> list[Request]:
    """Draws requests, no two alike: prompts of a few to 1,200 tokens, completions of up to 500."""
    requests = []
    for number in range(count):
        name = list(_FEATURES)[number % len(_FEATURES)]
        params = _FEATURES[name]
        if name == "beams":
            params = replace(params, max_tokens=rng.randint(8, 24))
        else:
            ends = name in _ENDS_BY_ITSELF or rng.random() < 0.2
            tokens = rng.choice([rng.randint(20, 80), rng.randint(150, 500)])
            params = replace(params, max_tokens=tokens, ignore_eos=None if ends else True)
        if name not in _NO_SEED:
            params = replace(params, seed=rng.getrandbits(63))
        requests.append(Request(f"{name} {number}", _draw_prompt(rng), params))
    return requests


def _draw_prompt(rng: random.Random) -> Prompt:
    kind = rng.random()
    story = rng.choice(_STORIES)
    if kind < 0.4:
        return f"{story} {rng.randint(2, 99)}"
    if kind < 0.6:
        question = f"What is {rng.randint(1, 50)} + {rng.randint(1, 50)}?"
        return [{"role": "user", "content": question}]
    length = rng.choice([rng.randint(5, 60), rng.randint(400, 1200)])
    return [rng.randrange(3, _VOCABULARY) for _ in range(length)]
