"""The servers to compare, each with one type of weights and one of KV cache."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from bench.workload import LONG_PROMPT, REPEATS, STREAM_PROMPT, STREAM_TOKENS, Shape

FILE = "file"  # the weights of a GGUF file as they are


@dataclass(frozen=True)
class Entry:
    name: str
    peer: str  # the name of its driver, bench/peers/<peer>.py, and of its environment
    weights: str
    cache: str  # type of the keys and values


ENTRIES = (
    Entry("nano-bf16", "nano", "bf16", "bf16"),
    Entry("nano-int8", "nano", "int8", "bf16"),
    Entry("nano-int4", "nano", "int4", "bf16"),
    Entry("nano-int8-kv8", "nano", "int8", "int8"),
    Entry("openvino-fp16", "openvino", "fp16", "u8"),
    Entry("openvino-int8", "openvino", "int8", "u8"),
    Entry("openvino-int4", "openvino", "int4", "u8"),
    Entry("llama-bf16", "llama_cpp", "BF16", "f16"),
    Entry("llama-q8_0", "llama_cpp", "Q8_0", "f16"),
    Entry("llama-q4_0", "llama_cpp", "Q4_0", "f16"),
    Entry("llama-file", "llama_cpp", FILE, "f16"),
    Entry("ik-q8_0", "ik_llama", "Q8_0", "f16"),
    Entry("ik-q4_0", "ik_llama", "Q4_0", "f16"),
    Entry("vllm-bf16", "vllm", "bfloat16", "bf16"),
    Entry("zentorch-bf16", "zentorch", "bfloat16", "bf16"),
)


@dataclass(frozen=True)
class Sizes:
    """The sizes of the measurements, in requests and tokens."""

    shape: Shape
    stream_prompt: int
    stream_tokens: int
    long_prompt: int
    repeats: int


FULL = Sizes(
    Shape(num_seqs=32, min_input=32, max_input=256, min_output=32, max_output=256),
    STREAM_PROMPT,
    STREAM_TOKENS,
    LONG_PROMPT,
    REPEATS,
)
TINY = Sizes(Shape(4, 8, 16, 4, 8), stream_prompt=8, stream_tokens=8, long_prompt=64, repeats=1)


@dataclass(frozen=True)
class Job:
    """A driver's task, which it reads from stdin as JSON."""

    model: str  # directory or file, in the peer's format
    text: list[int]  # token ids; prompts are pieces of it
    entry: Entry
    sizes: Sizes
    spawned_s: float  # on the monotonic clock, which all processes share

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        values = json.loads(text)
        sizes = values["sizes"]
        sizes["shape"] = Shape(**sizes["shape"])
        return cls(**{**values, "entry": Entry(**values["entry"]), "sizes": Sizes(**sizes)})
