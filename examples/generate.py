"""Sends several prompts at once, one of each kind: python examples/generate.py [HOST:PORT]"""

import sys

from nano_vllm_grpc import LLM, Prompt, SamplingParams

address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"

with LLM(address) as llm:
    prompts: list[Prompt] = [
        "Once upon a time",
        llm.tokenize("Once upon a time"),
        [{"role": "user", "content": "What is 17 + 25?"}],
    ]
    params = [
        SamplingParams(temperature=0.6, seed=1, max_tokens=48),
        SamplingParams(temperature=0.6, seed=2, max_tokens=48),
        SamplingParams(temperature=0, max_tokens=16),
    ]
    for prompt, completion in zip(prompts, llm.generate(prompts, params), strict=True):
        print(f"{prompt!r}\n  {completion['text']!r} ({completion['finish_reason']})")
