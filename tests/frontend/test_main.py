"""`python -m frontend`, run as a process of its own."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import sys
from pathlib import Path

from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deploy.ports import free_port
from nano_vllm_grpc.pb import frontend_pb2 as pb
from nano_vllm_grpc.pb.frontend_pb2_grpc import InferenceServiceStub
from tests.frontend.fake_scheduler import FakeScheduler
from tests.stack import DEMO_MODEL


async def start(*flags: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "frontend", *flags, stderr=asyncio.subprocess.PIPE
    )


def mapped_files(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


async def test_processes_share_a_port_without_torch_and_stop_when_told(
    demo: Path, scheduler: FakeScheduler
) -> None:
    port = free_port()
    flags = ["--model", str(demo), "--port", str(port)]
    flags += ["--scheduler-address", scheduler.address]
    processes = [await start(*flags) for _ in range(2)]
    for process in processes:
        assert process.stderr is not None
        async for line in process.stderr:
            if json.loads(line)["event"] == "connected to the scheduler":
                break
        assert "torch" not in mapped_files(process.pid)
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        message = pb.GenerateRequest(text="hi", sampling=pb.SamplingParams(max_tokens=1))
        await InferenceServiceStub(channel).Generate(message)
    for process in processes:
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0


async def test_a_known_reason_not_to_start_is_one_line_and_status_2(tmp_path: Path) -> None:
    process = await start("--model", str(tmp_path / "nowhere"))
    _, errors = await process.communicate()
    assert process.returncode == 2
    (line,) = errors.decode().splitlines()
    assert json.loads(line)["event"] == "cannot start"
    assert "nowhere" in json.loads(line)["reason"]


async def test_a_tokenizer_may_have_few_of_the_models_tokens(tmp_path: Path) -> None:
    """Models with random weights have the demo model's."""
    for path in DEMO_MODEL.glob("*.json"):
        shutil.copy(path, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 151936}))
    process = await start("--model", str(tmp_path), "--port", str(free_port()))
    assert process.stderr is not None
    async for line in process.stderr:
        if (event := json.loads(line)["event"]) in ("listening", "cannot start"):
            break
    process.terminate()
    assert (event, await process.wait()) == ("listening", 0)


async def test_a_model_without_its_tokenizer_is_not_served(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, tmp_path)
    process = await start("--model", str(tmp_path))
    _, errors = await process.communicate()
    assert process.returncode == 2
    reason = json.loads(errors.decode().splitlines()[-1])["reason"]
    assert "tokens, but the model has 1536; copy or download its files again" in reason
