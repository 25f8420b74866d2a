"""Messages that cost more to read, check or answer than to send."""

from __future__ import annotations

import random

from nano_vllm_grpc.pb import frontend_pb2 as pb
from tests.abuse.attack import Target, attack

_LIMIT = (4 << 20) - 64  # bytes of a message that is still read
_AT_ONCE = 4
_RESUMED = 39_000  # tokens, if the model takes as many


async def _flood(target: Target, method: str, *messages: bytes, at_once: int = _AT_ONCE) -> None:
    """Sends the messages in turn, each on a connection with others, until the attack is over."""
    number = 0
    async with target.channel() as channel:

        async def send() -> None:
            nonlocal number
            number += 1
            await target.ask(channel, method, messages[number % len(messages)])

        await target.flood(send, at_once)


@attack()
async def resumed_stops(target: Target) -> None:
    """39,000 tokens to resume after, and 16 stop strings that each of them nearly completes."""
    async with target.channel() as channel:
        text = pb.DetokenizeRequest(token_ids=[300])
        answer = await target.ask(channel, "Detokenize", text.SerializeToString())
    token = pb.DetokenizeResponse.FromString(answer or b"").text or "a"
    count = min(_RESUMED, await target.max_model_len() - 8)
    stops = [(token * 1024)[: 1000 + number] + "\0" for number in range(16)]
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[5, 6, 7]),
        resume_token_ids=[300] * count,
        sampling=pb.SamplingParams(max_tokens=count + 1, stop=stops),
    )
    await _flood(target, "Generate", request.SerializeToString())


@attack()
async def long_texts(target: Target) -> None:
    """Tokenize of 4 MB, in one word and in many, 16 at once: the tokenizer's threads are shared."""
    rng = random.Random(1)
    words = " ".join("".join(rng.choices("abcdefgh", k=6)) for _ in range(_LIMIT // 7))
    word = "".join(rng.choices("abcdefgh", k=_LIMIT))
    texts = [pb.TokenizeRequest(text=text).SerializeToString() for text in (words, word)]
    await _flood(target, "Tokenize", *texts, at_once=16)


@attack()
async def many_logprobs(target: Target) -> None:
    """16 completions of the largest length with 20 log-probabilities each, held for one answer."""
    sampling = pb.SamplingParams(n=16, logprobs=20, ignore_eos=True, temperature=1)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6, 7]), sampling=sampling)
    await _flood(target, "Generate", request.SerializeToString())


@attack()
async def large_messages(target: Target) -> None:
    """Messages of 60 MiB, 15 times the limit, on 16 streams at once."""
    await _flood(target, "Generate", bytes(60 << 20), at_once=16)
