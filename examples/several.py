"""Makes several completions of a prompt, sampled or by beam search: python examples/several.py
[HOST:PORT]"""

import sys

from nano_vllm_grpc import LLM, SamplingParams

address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"

with LLM(address) as llm:
    sampled = SamplingParams(n=3, seed=1, temperature=0.8, top_p=0.9, logprobs=0, max_tokens=16)
    for completion in llm.generate("Once upon a time", sampled, use_tqdm=False):
        total = sum(next(iter(row.values())) for row in completion["logprobs"])
        print(f"{completion['index']} {total:8.3f} {completion['text']!r}")
    beams = SamplingParams(beam_width=3, length_penalty=1.0, max_tokens=16)
    for completion in llm.generate("Once upon a time", beams, use_tqdm=False):
        print(f"{completion['index']} {completion['score']:8.3f} {completion['text']!r}")
