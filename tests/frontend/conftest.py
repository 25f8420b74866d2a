"""The public service in this process, over real gRPC, with a fake scheduler behind it."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import hypothesis
import pytest
from google.rpc import status_pb2
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from transformers import AutoTokenizer

from deploy.ports import free_port
from frontend.api.servicer import SERVICE_NAME
from frontend.engines.engine import EngineClient
from frontend.engines.prefix_index import PrefixIndex
from frontend.metrics import RequestMetrics
from frontend.service import Frontend
from frontend.settings import FrontendSettings
from nano_vllm_grpc.pb import frontend_pb2 as pb
from nano_vllm_grpc.pb.frontend_pb2_grpc import InferenceServiceStub
from shared.pb import scheduler_pb2
from shared.rpc.server import Server
from tests.frontend.cluster import Cluster, Two
from tests.frontend.fake_scheduler import FakeScheduler

# On a busy machine an example may take long. Examples are the same in every run.
hypothesis.settings.register_profile("frontend", deadline=None, derandomize=True)
hypothesis.settings.load_profile("frontend")

DEMO = Path(__file__).parents[2] / "models" / "demo"
QWEN3_TEMPLATE = Path(__file__).with_name("qwen3_chat_template.jinja")


def link_with_qwen3_template(directory: Path) -> None:
    """Makes `directory` the demo model with the chat template of Qwen3."""
    for path in DEMO.iterdir():
        (directory / path.name).symlink_to(path)
    (directory / "chat_template.jinja").symlink_to(QWEN3_TEMPLATE)


@dataclass
class Service:
    """A running frontend, the fake scheduler that it talks to, and a client."""

    address: str
    server: Server
    scheduler: FakeScheduler
    channel: aio.Channel
    stub: Any
    metrics: RequestMetrics

    async def wait_for_health(self, serving: bool) -> None:
        """Waits until the health service reports `serving`."""
        status = health_pb2.HealthCheckResponse
        wanted = status.SERVING if serving else status.NOT_SERVING
        watch = health_pb2_grpc.HealthStub(self.channel).Watch(
            health_pb2.HealthCheckRequest(service=SERVICE_NAME)
        )
        async for response in watch:
            if response.status == wanted:
                watch.cancel()
                return

    async def reconnect(self) -> None:
        """Has the frontend lose its connection and make another."""
        self.scheduler.ready.clear()  # until the loss has been seen
        self.scheduler.drop_connection()
        await self.wait_for_health(False)
        self.scheduler.ready.set()
        await self.wait_for_health(True)

    async def collect(self, request: pb.GenerateRequest) -> list[pb.GenerateStreamResponse]:
        return [response async for response in self.stub.GenerateStream(request)]


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    """The metadata of a call with a token."""
    return (("authorization", f"Bearer {token}"),)


async def failure(call: Any) -> aio.AioRpcError:
    """The error with which a call ends."""
    with pytest.raises(aio.AioRpcError) as raised:
        await call
    return raised.value


async def rejection(call: Any) -> tuple[grpc.StatusCode, str]:
    """The status and the message with which a call ends."""
    error = await failure(call)
    return error.code(), error.details() or ""


def detail(error: aio.AioRpcError, kind: type[Any]) -> Any:
    """The status detail of type `kind` that came with an error."""
    trailers = dict(error.trailing_metadata())
    status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    found = kind()
    assert status.details[0].Unpack(found)
    return found


@pytest.fixture(scope="session")
def demo() -> Path:
    return DEMO


@pytest.fixture(scope="session")
def hf() -> Any:
    """The demo model's tokenizer in transformers: the oracle."""
    return AutoTokenizer.from_pretrained(str(DEMO))


@pytest.fixture
def socket_path() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="nano") as directory:  # short: sockets allow 107 bytes
        yield f"unix:{directory}/s"


@pytest.fixture
async def scheduler(socket_path: str) -> AsyncIterator[FakeScheduler]:
    fake = FakeScheduler(socket_path)
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
def settings(scheduler: FakeScheduler) -> FrontendSettings:
    return FrontendSettings(
        model=str(DEMO),
        port=free_port(),
        scheduler_address=scheduler.address,
        drain_timeout_s=0.2,
        max_message_bytes=1 << 20,
    )


@pytest.fixture
async def service(scheduler: FakeScheduler, settings: FrontendSettings) -> AsyncIterator[Service]:
    metrics = RequestMetrics(settings.model)
    frontend = Frontend(settings, metrics=metrics)
    server, serving = frontend.server, asyncio.create_task(frontend.serve())
    address = f"{settings.host}:{settings.port}"
    try_again_soon = [("grpc.initial_reconnect_backoff_ms", 50)]
    async with aio.insecure_channel(address, options=try_again_soon) as channel:
        service = Service(
            address, server, scheduler, channel, InferenceServiceStub(channel), metrics
        )
        await channel.channel_ready()
        await service.wait_for_health(True)
        yield service
    server.stop()
    await serving


@pytest.fixture
async def cluster(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    take = EngineClient._take

    async def take_and_note(
        self: EngineClient, message: scheduler_pb2.BlockEvents, index: PrefixIndex
    ) -> None:
        await take(self, message, index)
        cluster.taken.append(message)

    monkeypatch.setattr(EngineClient, "_take", take_and_note)
    with tempfile.TemporaryDirectory(prefix="nano") as directory:  # short: sockets allow 107 bytes
        cluster = Cluster(Path(directory))
        yield cluster
        await cluster.close()


@pytest.fixture
async def a(cluster: Cluster) -> FakeScheduler:
    """The only engine."""
    scheduler = await cluster.add("a")
    await cluster.list("a")
    return scheduler


@pytest.fixture
async def two(cluster: Cluster) -> Two:
    """Engines a and b."""
    schedulers = await cluster.add("a"), await cluster.add("b")
    await cluster.list("a", "b")
    return schedulers
