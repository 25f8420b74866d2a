"""Holds a conversation, sending every turn along with the earlier ones: python examples/chat.py
[HOST:PORT]"""

import sys

from nano_vllm_grpc import LLM, Message, SamplingParams

address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
messages: list[Message] = []

with LLM(address) as llm:
    for question in ("What is 17 + 25?", "Tell me a story."):
        messages.append({"role": "user", "content": question})
        answer = llm.generate(messages, SamplingParams(max_tokens=64), use_tqdm=False)[0]["text"]
        messages.append({"role": "assistant", "content": answer})
        print(f"> {question}\n{answer}")
