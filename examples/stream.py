"""Prints text as it is made: python examples/stream.py [HOST:PORT]"""

import sys

from nano_vllm_grpc import LLM, SamplingParams

address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"

with LLM(address) as llm:
    for chunk in llm.stream("Once upon a time", SamplingParams(max_tokens=64)):
        print(chunk.text, end="", flush=True)
        if chunk.usage:  # the last one
            print(f"\n[{chunk.finish_reason}, {chunk.usage['completion_tokens']} tokens]")
