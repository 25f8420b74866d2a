"""Makes text that matches a schema, a regular expression, or one of a few answers: python
examples/structured_output.py [HOST:PORT]"""

import sys

from nano_vllm_grpc import LLM, SamplingParams, StructuredOutput

address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
person = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 16}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}

with LLM(address) as llm:
    for prompt, wanted in (
        ("Jason is 25 years old.", StructuredOutput(json_schema=person)),
        ("Once upon a time", StructuredOutput(regex=r"[0-9]{4}-[0-9]{2}-[0-9]{2}")),
        ("Do bees make honey?", StructuredOutput(choice=["yes", "no"])),
    ):
        params = SamplingParams(structured_output=wanted, max_tokens=64)
        print(llm.generate(prompt, params, use_tqdm=False)[0]["text"])
