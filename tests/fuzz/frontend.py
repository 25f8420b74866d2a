"""Hostile requests to a frontend on a real scheduler and a real worker with the demo model."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

import frontend.server
import scheduler_svc.__main__ as scheduler_main
import worker_svc.__main__ as worker_main
from frontend.settings import FrontendSettings
from scheduler_svc.settings import SchedulerSettings
from shared.config import load_settings
from shared.pb import frontend_pb2 as pb
from shared.pb.frontend_pb2_grpc import InferenceServiceStub
from shared.pb.scheduler_pb2 import GetLoadRequest, GetLoadResponse
from shared.pb.scheduler_pb2_grpc import SchedulerServiceStub
from tests.frontend.conftest import DEMO, free_port
from tests.fuzz.corpus import Case, load_cases
from tests.fuzz.tally import DEADLINE_S, Tally, at_rest, unary
from tests.fuzz.values import CANARY, draw_messages
from tests.scheduler_svc.grammar.host import TestHost
from worker_svc.settings import WorkerSettings

SERVICE = frontend.server.SERVICE_NAME
_AT_ONCE = 16


@dataclass
class Stack:
    """Three services in this process, and clients of two of them."""

    address: str
    channel: aio.Channel
    load_stub: SchedulerServiceStub

    async def completion(self) -> list[int]:
        """Returns the tokens of a valid, greedy request."""
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[5, 6, 7]),
            sampling=pb.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
        )
        stub = InferenceServiceStub(self.channel)
        answer = await stub.Generate(request, timeout=DEADLINE_S)
        (completion,) = answer.completions
        return list(completion.token_ids)

    async def load(self) -> GetLoadResponse:
        load: GetLoadResponse = await self.load_stub.GetLoad(GetLoadRequest(), timeout=DEADLINE_S)
        return load


@asynccontextmanager
async def running_stack(directory: Path) -> AsyncIterator[Stack]:
    """Runs a stack so small that completions are short, on Unix sockets in `directory`."""
    worker, scheduler = f"unix:{directory}/w", f"unix:{directory}/s"
    steps = ["--max-num-seqs=8", "--max-num-batched-tokens=64", f"--model={DEMO}"]
    steps.append("--hang-timeout-s=600")  # drawing messages blocks the same event loop
    worker_flags = ["--device=cpu", "--dtype=float32", "--threads=1", "--max-model-len=48"]
    worker_settings = load_settings(
        WorkerSettings, [f"--worker-addresses={worker}", *steps, *worker_flags, "--kv-blocks=32"]
    )
    scheduler_settings = load_settings(
        SchedulerSettings,
        [f"--worker-addresses={worker}", f"--scheduler-address={scheduler}", *steps],
    )
    settings = FrontendSettings(
        model=str(DEMO), port=free_port(), scheduler_address=scheduler, max_message_bytes=1 << 18
    )
    server = frontend.server.public_server(settings)
    host = TestHost()
    tasks = [
        asyncio.create_task(worker_main.serve(worker_settings)),
        asyncio.create_task(scheduler_main.serve(scheduler_settings, link=host.link)),
        asyncio.create_task(frontend.server.serve(server, settings)),
    ]
    address = f"{settings.host}:{settings.port}"
    try:
        async with (
            aio.insecure_channel(address) as channel,
            aio.insecure_channel(scheduler) as to_s,
        ):
            await _serving(channel, SERVICE)
            yield Stack(address, channel, SchedulerServiceStub(to_s))
    finally:
        for task in reversed(tasks):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        host.close()


async def _serving(channel: aio.Channel, service: str) -> None:
    request = health_pb2.HealthCheckRequest(service=service)
    watch = health_pb2_grpc.HealthStub(channel).Watch(request, wait_for_ready=True)
    async for response in watch:
        if response.status == health_pb2.HealthCheckResponse.SERVING:
            watch.cancel()
            return


async def fuzz(stack: Stack, count: int, seed: int) -> Tally:
    """Sends the corpus and `count` messages, nearly a fifth of them to the small methods. Valid
    requests run alongside and must get what they get alone; nothing may be left in the end."""
    tally = Tally()
    expected = await stack.completion()
    cases = [*draw_cases(count, seed), *load_cases("frontend")]

    async def send() -> None:
        while cases:
            case = cases.pop()
            await send_case(stack.channel, tally, case)
            if len(cases) % 50 == 0 and await stack.completion() != expected:
                tally.problem("a valid request got other tokens", case)

    await asyncio.gather(*(send() for _ in range(_AT_ONCE)))
    if await stack.completion() != expected:
        tally.problem("a valid request got other tokens", "everything")
    await at_rest(stack.load)
    return tally


def draw_cases(count: int, seed: int) -> list[Case]:
    """Draws cases of one message, in random order."""
    few = count // 12
    cases: list[Case] = []
    shares = [
        ("Tokenize", pb.TokenizeRequest, TOKENIZE, few),
        ("Detokenize", pb.DetokenizeRequest, DETOKENIZE, few),
        ("GetModel", pb.GetModelRequest, [pb.GetModelRequest()], count // 50),
    ]
    left = count - sum(share[3] for share in shares)
    shares.append(("GenerateStream", pb.GenerateRequest, GENERATE, left // 2))
    shares.append(("Generate", pb.GenerateRequest, GENERATE, left - left // 2))
    for i, (method, kind, examples, number) in enumerate(shares):
        drawn = draw_messages(kind, examples, number, seed + i * count)
        cases += [Case(method, (message,)) for message in drawn]
    random.Random(seed).shuffle(cases)
    return cases


async def send_case(channel: aio.Channel, tally: Tally, case: Case, **options: Any) -> None:
    """Sends a case's messages, each in a call of its own."""
    name = f"/{SERVICE}/{case.method}"
    for message in case.messages:
        try:
            if case.method == "GenerateStream":
                call = channel.unary_stream(name)(message, timeout=DEADLINE_S, **options)
                async for _ in call:
                    pass
            else:
                await unary(channel, name, message, **options)
        except aio.AioRpcError as error:
            tally.status(case, error)
        else:
            tally.status(case, None)


def _request(**fields: object) -> pb.GenerateRequest:
    sampling = fields.pop("sampling", {})
    assert isinstance(sampling, dict)
    params = pb.SamplingParams(**{"max_tokens": 4, **sampling})
    return pb.GenerateRequest(sampling=params, **fields)  # type: ignore[arg-type]


_IDS = pb.TokenIds(ids=[1, 2, 3])
_CHAT = pb.Chat(messages=[pb.ChatMessage(role="user", content=CANARY)])
GENERATE = [
    _request(text=CANARY),
    _request(token_ids=_IDS, priority=-3, cache_salt="salt", request_id="name"),
    _request(chat=_CHAT, sampling={"stop": ["a", "the"], "seed": 7, "stop_token_ids": [9]}),
    _request(token_ids=_IDS, resume_token_ids=[4, 5], sampling={"temperature": 0}),
    _request(token_ids=_IDS, sampling={"n": 3, "temperature": 1, "logprobs": 2}),
    _request(token_ids=_IDS, sampling={"beam_width": 3, "length_penalty": 0.5}),
    _request(
        token_ids=_IDS,
        sampling={
            "top_k": 9,
            "top_p": 0.9,
            "min_p": 0.1,
            "repetition_penalty": 1.2,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.5,
            "logit_bias": {3: 2.0, 4: -2.0},
            "min_tokens": 2,
            "prompt_logprobs": 1,
            "skip_special_tokens": False,
        },
    ),
    _request(
        token_ids=_IDS,
        sampling={"structured_output": pb.StructuredOutput(regex="[a-z]{2,5}")},
    ),
    _request(
        token_ids=_IDS,
        sampling={"structured_output": pb.StructuredOutput(json_schema='{"type": "integer"}')},
    ),
    _request(
        token_ids=_IDS,
        sampling={"structured_output": pb.StructuredOutput(grammar='root ::= "a" | "b" root')},
    ),
    _request(
        token_ids=_IDS,
        sampling={
            "structured_output": pb.StructuredOutput(choice=pb.Choice(options=["yes", "no"]))
        },
    ),
]
TOKENIZE = [pb.TokenizeRequest(text=CANARY), pb.TokenizeRequest(chat=_CHAT)]
DETOKENIZE = [pb.DetokenizeRequest(token_ids=[1, 2, 3, 500])]
