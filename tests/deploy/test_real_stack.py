"""The real services on the demo model, through the launcher."""

from __future__ import annotations

import grpc
import psutil
import pytest

from deploy.health import CHANNEL_OPTIONS
from nano_vllm_grpc.pb import frontend_pb2, frontend_pb2_grpc

from .conftest import Launcher
from .test_commands import named

pytestmark = pytest.mark.system


def test_the_real_stack(launcher: Launcher, port: int) -> None:
    launcher.use_real_services()
    up = launcher("up", "--port", port, "--frontends", 2, "--kv-blocks", 64)
    assert up.returncode == 0, up.stderr
    assert "Once upon a time" in up.stdout

    # Both frontends answer: a connection may reach either.
    for _ in range(8):
        with grpc.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS) as channel:
            stub = frontend_pb2_grpc.InferenceServiceStub(channel)
            capacity = stub.GetModel(frontend_pb2.GetModelRequest()).capacity
            assert (capacity.num_blocks, capacity.tensor_parallel_size) == (64, 1)

    ps = launcher("ps", "--port", port)
    assert ps.stdout.count("RUNNING/SERVING") == 4

    top = launcher("top", "--port", port)
    assert top.returncode == 0, top.stderr
    assert "2 frontends connected" in top.stdout
    assert "of 64" in top.stdout

    # The supervisor dies, and a scheduler while there is none: another one gives it its settings.
    named(launcher.members(port), "deploy.native.supervisor").kill()
    scheduler = named(launcher.members(port), "scheduler_svc")
    scheduler.kill()
    psutil.wait_procs([scheduler])
    again = launcher("up", "--port", port)
    assert again.returncode == 0, again.stderr
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS) as channel:
        stub = frontend_pb2_grpc.InferenceServiceStub(channel)
        assert stub.GetModel(frontend_pb2.GetModelRequest()).capacity.num_blocks == 64


def test_a_broken_model_is_refused_with_its_reason(launcher: Launcher, port: int) -> None:
    launcher.use_real_services()
    model = launcher.directory / "model"
    model.mkdir()
    (model / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    up = launcher("up", "--port", port, "--services", "worker", "--model", "model")
    assert up.returncode == 1
    assert "worker-0 cannot start:" in up.stderr
    assert "LlamaForCausalLM" in up.stderr
    assert not launcher.members(port)


def test_a_cache_that_a_cpu_does_not_serve_is_refused(launcher: Launcher, port: int) -> None:
    launcher.use_real_services()
    flags = "--services", "worker", "--device", "cpu", "--kv-dtype", "fp8"
    up = launcher("up", "--port", port, *flags)
    assert up.returncode == 1
    assert "worker-0 cannot start: kv_dtype: fp8 is not served on a CPU; use int8" in up.stderr
