"""Runs streams side by side in asyncio; leaving one early frees its place on the server.
python examples/async_many.py [HOST:PORT]"""

import asyncio
import sys
from contextlib import aclosing

from nano_vllm_grpc import AsyncLLM, LLMError, SamplingParams

address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"


async def first_sentence(llm: AsyncLLM, prompt: str) -> str:
    text = prompt
    async with aclosing(llm.stream(prompt, SamplingParams(max_tokens=64))) as stream:
        async for chunk in stream:
            text += chunk.text
            if "." in chunk.text:
                break  # cancels the request
    return text


async def main() -> None:
    async with AsyncLLM(address) as llm:
        prompts = [f"Once upon a time there were {n} cats" for n in range(2, 10)]
        for sentence in await asyncio.gather(*(first_sentence(llm, p) for p in prompts)):
            print(sentence)
        try:
            await llm.generate("", use_tqdm=False)
        except LLMError as error:
            print(f"an empty prompt: {error}")


asyncio.run(main())
