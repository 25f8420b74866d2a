"""Messages that cost more to read, check or answer than to send."""

from __future__ import annotations

import random

from nano_vllm_grpc.pb import frontend_pb2 as pb
from tests.abuse.attack import Target, attack

_LIMIT = (4 << 20) - 64  # bytes of a message that is still read
_AT_ONCE = 4
_RESUMED = 39_000  # tokens, if the model takes as many
_VALID = pb.GenerateRequest(
    token_ids=pb.TokenIds(ids=[5, 6, 7]), sampling=pb.SamplingParams(max_tokens=1)
)
_UNUSED_FIELD = 15  # of GenerateRequest; the last number whose key is one byte


async def _flood(target: Target, method: str, *messages: bytes, at_once: int = _AT_ONCE) -> None:
    """Sends the messages in turn, each on a connection with others, until the attack is over."""
    number = 0
    async with target.channel() as channel:

        async def send() -> None:
            nonlocal number
            number += 1
            await target.ask(channel, method, messages[number % len(messages)])

        await target.flood(send, at_once)


def _nested(field: int, body: bytes) -> bytes:
    """A field that holds `body`, of up to 256 MiB."""
    length, size = bytearray(), len(body)
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    return bytes([field << 3 | 2, *length, size]) + body


@attack()
async def chat_messages(target: Target) -> None:
    """Chats of 60,000 messages, each valid: converted and rendered one by one."""
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="a")] * 60_000)
    await _flood(target, "Generate", pb.GenerateRequest(chat=chat).SerializeToString())


@attack()
async def empty_chat_messages(target: Target) -> None:
    """Chats of two million empty messages in 4 MiB: objects that cost 2 bytes to send."""
    await _flood(target, "Generate", _nested(4, b"\x0a\x00" * (_LIMIT // 2)))


@attack()
async def unknown_fields(target: Target) -> None:
    """Two million unknown fields in 4 MiB, which a walk over unknown fields takes one by one."""
    unknown = bytes([_UNUSED_FIELD << 3, 1]) * (_LIMIT // 2)
    await _flood(target, "Generate", _VALID.SerializeToString() + unknown)


@attack()
async def unknown_groups(target: Target) -> None:
    """Two million unknown groups in 4 MiB, empty ones and nested 50 deep."""
    begin, end = bytes([_UNUSED_FIELD << 3 | 3]), bytes([_UNUSED_FIELD << 3 | 4])
    valid = _VALID.SerializeToString()
    deep = (begin * 50 + end * 50) * (_LIMIT // 100)
    await _flood(target, "Generate", valid + (begin + end) * (_LIMIT // 2), valid + deep)


@attack()
async def deep_nesting(target: Target) -> None:
    """Groups nested two million deep, and schemas nested thousands deep."""
    group = bytes([_UNUSED_FIELD << 3 | 3]) * (_LIMIT // 2)
    schema = '{"items":' * 6_000 + "{}" + "}" * 6_000
    output = pb.StructuredOutput(json_schema=schema)
    nested = pb.GenerateRequest(
        text="a", sampling=pb.SamplingParams(max_tokens=1, structured_output=output)
    )
    valid = _VALID.SerializeToString()
    await _flood(target, "Generate", valid + group, nested.SerializeToString())


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
async def many_biases(target: Target) -> None:
    """A logit_bias of 300,000 entries, to be sorted before it is refused."""
    biases = {number * 7 % 300_007: 1.0 for number in range(300_000)}
    request = pb.GenerateRequest(text="a", sampling=pb.SamplingParams(logit_bias=biases))
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
async def long_detokenize(target: Target) -> None:
    """Detokenize of two million tokens, 16 at once."""
    request = pb.DetokenizeRequest(token_ids=[100] * (_LIMIT // 2))
    await _flood(target, "Detokenize", request.SerializeToString(), at_once=16)


@attack()
async def many_logprobs(target: Target) -> None:
    """16 completions of the largest length with 20 log-probabilities each, held for one answer."""
    sampling = pb.SamplingParams(n=16, logprobs=20, ignore_eos=True, temperature=1)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6, 7]), sampling=sampling)
    await _flood(target, "Generate", request.SerializeToString())


@attack()
async def prompt_logprobs(target: Target) -> None:
    """20 log-probabilities for each token of long prompts: hundreds of thousands of objects."""
    length = min(20_000, await target.max_model_len() - 8)
    rng = random.Random(1)
    sampling = pb.SamplingParams(max_tokens=1, prompt_logprobs=20)
    requests = [
        pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=rng.choices(range(3, 1500), k=length)), sampling=sampling
        ).SerializeToString()
        for _ in range(4)
    ]
    await _flood(target, "Generate", *requests)


@attack()
async def metadata(target: Target) -> None:
    """Calls with 400 entries of metadata, and with 15 KiB in one."""
    many = [(f"x-{number}", "v") for number in range(400)]
    large = [("x-large", "x" * (15 << 10))]
    async with target.channel() as channel:

        async def send() -> None:
            for each in (many, large):
                await target.ask(channel, "GetModel", b"", [*target.metadata, *each])

        await target.flood(send, 16)


@attack()
async def large_messages(target: Target) -> None:
    """Messages of 60 MiB, 16 times the limit and still received, on 16 streams at once."""
    await _flood(target, "Generate", bytes(60 << 20), at_once=16)
