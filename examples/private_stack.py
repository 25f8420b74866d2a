"""Starts a private server and stops it when done: python examples/private_stack.py [MODEL]"""

import sys

from nano_vllm_grpc import LLM, SamplingParams

model = sys.argv[1] if len(sys.argv) > 1 else "models/demo"

with LLM(model=model, max_num_seqs=16) as llm:  # other variables of `make up` go here too
    print(f"{llm.get_model().model} at {llm.address}")
    print(llm.generate("Once upon a time", SamplingParams(max_tokens=32))[0]["text"])
