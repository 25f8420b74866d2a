"""Streams of a plain client, which neither resumes nor resubmits anything."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import grpc

from nano_vllm_grpc.pb.frontend_pb2 import (
    Choice,
    GenerateRequest,
    SamplingParams,
    StructuredOutput,
    TokenIds,
)
from nano_vllm_grpc.pb.frontend_pb2_grpc import InferenceServiceStub
from nano_vllm_grpc.wire import decode_chunk
from tests.faults.transcript import Transcript
from tests.waiting import WAIT_S

_TOKENS = 160


def _request(text: str, **sampling: Any) -> GenerateRequest:
    params = SamplingParams(**{"max_tokens": _TOKENS, "ignore_eos": True, **sampling})
    return GenerateRequest(text=text, sampling=params)


def _structured(text: str, **kind: Any) -> GenerateRequest:
    output = StructuredOutput(**kind)
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=_TOKENS, structured_output=output)
    return GenerateRequest(text=text, sampling=params)


STORY = "Once upon a time, there was a little fox who"

# Each has exactly one right answer: it is greedy, or has a seed.
REQUESTS: dict[str, GenerateRequest] = {
    "greedy": _request(STORY, temperature=0),
    "seeded": _request(STORY, temperature=1.0, seed=1),
    "ends by itself": GenerateRequest(
        text="What is 17 + 25?", sampling=SamplingParams(temperature=0.7, seed=2)
    ),
    "filters": _request("A hen", temperature=1.3, seed=3, top_k=40, top_p=0.9, min_p=0.02),
    "penalties": _request(
        "The fox", temperature=0, repetition_penalty=1.2, frequency_penalty=0.4, max_tokens=120
    ),
    "logprobs": _request("One day", temperature=1.0, seed=4, logprobs=2, prompt_logprobs=1),
    "stop string": _request("Tell me", temperature=1.0, seed=6, stop=["zebra"]),
    "several": _request("In a wood", temperature=1.0, seed=7, n=2, max_tokens=120),
    "beams": GenerateRequest(text=STORY, sampling=SamplingParams(max_tokens=40, beam_width=3)),
    "schema": _structured(
        "A fox as JSON: ",
        json_schema='{"type": "object", "properties": {"name": {"enum": ["fox", "hen"]}, '
        '"legs": {"type": "array", "items": {"type": "integer"}, "minItems": 20, '
        '"maxItems": 20}}, "required": ["name", "legs"], "additionalProperties": false}',
    ),
    "regex": _structured("Answer: ", regex=r"(yes|no)(, [a-z]{3,8}){15}!"),
    "choice": _structured("Fox or hen? ", choice=Choice(options=["the fox", "the hen"])),
}

# Those with the most tokens.
LONG = ("greedy", "seeded", "filters", "penalties", "several", "stop string")


def long_prompts(count: int, length: int, vocab_size: int) -> dict[str, GenerateRequest]:
    """Makes long prompts, no two with a common prefix; greedy and seeded in turn."""
    requests = {}
    for number in range(count):
        ids = [(7 * i * i + 13 * i + 101 * number) % (vocab_size - 10) + 3 for i in range(length)]
        sampling = SamplingParams(
            temperature=number % 2, seed=number, max_tokens=20, ignore_eos=True
        )
        if number == 0:
            sampling.prompt_logprobs = 1
        requests[f"long {number}"] = GenerateRequest(token_ids=TokenIds(ids=ids), sampling=sampling)
    return requests


class OpenStreams:
    """Requests that are being answered, and the transcript of each so far."""

    def __init__(self, address: str, requests: Mapping[str, GenerateRequest]) -> None:
        self.transcripts = {name: Transcript() for name in requests}
        self.errors: dict[str, grpc.RpcError] = {}
        self.open = set(requests)
        self._changed = threading.Condition()
        self._channel = grpc.insecure_channel(address)
        stub = InferenceServiceStub(self._channel)
        calls = {
            name: stub.GenerateStream(request, timeout=WAIT_S) for name, request in requests.items()
        }
        self._threads = [
            threading.Thread(target=self._read, args=item, daemon=True) for item in calls.items()
        ]
        for thread in self._threads:
            thread.start()

    def wait_until(self, reached: Callable[[], bool]) -> None:
        """Returns as soon as `reached` is true; it is checked after each chunk."""
        with self._changed:
            assert self._changed.wait_for(reached, WAIT_S), self.summary()

    @property
    def num_tokens(self) -> int:
        """That all streams together have so far."""
        return sum(each.num_tokens for each in self.transcripts.values())

    def wait_for_tokens(self, count: int) -> None:
        """Returns once all streams together have `count` tokens."""
        self.wait_until(lambda: self.num_tokens >= count)

    def wait_ended(self) -> dict[str, Transcript]:
        """Returns the transcripts once all requests have ended without an error."""
        self.wait_until(lambda: not self.open)
        assert not self.errors, self.errors
        return self.transcripts

    def summary(self) -> str:
        counts = {name: self.transcripts[name].num_tokens for name in sorted(self.open)}
        return f"tokens of the open streams: {counts}"

    def close(self) -> None:
        self._channel.close()
        for thread in self._threads:
            thread.join()

    def _read(self, name: str, call: Any) -> None:
        try:
            for message in call:
                with self._changed:
                    self.transcripts[name].add(decode_chunk(message))
                    self._changed.notify_all()
        except grpc.RpcError as error:
            self.errors[name] = error
        with self._changed:
            self.open.discard(name)
            self._changed.notify_all()


@contextmanager
def open_streams(address: str, requests: Mapping[str, GenerateRequest]) -> Iterator[OpenStreams]:
    """Opens all streams at once, over one connection; cancels those still open at the end."""
    streams = OpenStreams(address, requests)
    try:
        yield streams
    finally:
        streams.close()


def undisturbed(address: str, requests: Mapping[str, GenerateRequest]) -> dict[str, Transcript]:
    """Returns the transcripts of requests that nothing disturbs."""
    with open_streams(address, requests) as streams:
        return streams.wait_ended()


def assert_undamaged(found: dict[str, Transcript], expected: dict[str, Transcript]) -> None:
    """Compares tokens, and everything else that a client sees."""
    damage = {name: each.compare(expected[name]).differences for name, each in found.items()}
    assert not {name: differences for name, differences in damage.items() if differences}
