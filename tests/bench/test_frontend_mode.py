"""The benchmark of the frontend through its real processes, at a tiny size."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.frontend_mode import main
from bench.http2 import Connection
from bench.step_clock import StepClock
from bench.stream_client import METHOD
from nano_vllm_grpc.pb import frontend_pb2 as pb
from tests.bench.command import status
from tests.client.fake_server import FakeServer
from tests.waiting import WAIT_S

ROOT = Path(__file__).parents[2]
CALLS, TOKENS = 6, 10


class FakeTransport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data


def frame(kind: int, stream: int, payload: bytes, flags: int = 0) -> bytes:
    """Encodes an HTTP/2 frame: RFC 9113, 4.1."""
    header = len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big")
    return header + payload


@pytest.mark.system
def test_every_token_is_delivered_and_the_figures_are_written(tmp_path: Path) -> None:
    out = tmp_path / "frontend.json"
    sizes = ["--calls", str(CALLS), "--tokens", str(TOKENS), "--rate", "600", "--out", out]
    command = [sys.executable, "-m", "bench.frontend_mode", *sizes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, cwd=ROOT)

    assert done.returncode == 0, done.stderr
    assert "tokens/s" in done.stdout
    found = json.loads(out.read_text())
    assert (found["mode"], found["calls"]) == ("frontend", CALLS)
    assert found["tokens_per_s"] > 0
    assert found["scaling"] == found["tokens_per_s_two_frontends"] / found["tokens_per_s"]
    assert [run["frontends"] for run in found["runs"]] == [1, 1, 2, 2]
    for run in found["runs"]:
        paced = run["offered_tokens_per_s"] is not None
        assert run["tokens"] == CALLS * TOKENS * (1 if paced else 4)
        assert run["tokens_per_chunk"] >= 1
        assert len(run["frontend_cpu_s"]) == len(run["calls_per_frontend"]) == run["frontends"]
        assert sum(run["calls_per_frontend"]) == CALLS
        if paced:
            assert 0 <= run["latency_p50_s"] <= run["latency_p99_s"]
        else:
            assert run["latency_p50_s"] is None
    assert found["machine"]["cores"] >= 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--calls", "0"], "--calls: must be over 0"),
        (["--model", "/nowhere"], "--model: "),
    ],
)
def test_what_cannot_be_measured_is_a_plain_message(
    capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert status(main, flags) != 0
    assert message in capsys.readouterr().err


async def test_the_client_reads_streams_of_a_real_server(server: FakeServer) -> None:
    received: dict[int, list[int]] = {7: [], 8: []}
    host, _, port = server.address.rpartition(":")
    _, connection = await asyncio.get_running_loop().create_connection(
        lambda: Connection(server.address, METHOD), host, int(port)
    )

    def call(prompt: int) -> asyncio.Future[None]:
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[prompt]), sampling=pb.SamplingParams(max_tokens=50)
        )

        def on_message(data: bytes) -> None:
            received[prompt] += pb.GenerateStreamResponse.FromString(data).token_ids

        return connection.call(request.SerializeToString(), on_message)

    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(call(7), call(8))
    connection.close()
    assert received == {7: 50 * [8], 8: 50 * [9]}


async def test_messages_are_found_however_frames_and_reads_cut_them() -> None:
    transport = FakeTransport()
    connection = Connection("here", METHOD)
    connection.connection_made(transport)
    received: list[bytes] = []
    ended = connection.call(b"", received.append)
    messages = b"".join(b"\0" + len(m).to_bytes(4, "big") + m for m in (b"one", b"", b"three"))
    wire = frame(0, 1, messages[:2]) + frame(0, 1, messages[2:]) + frame(6, 0, b"12345678")

    for byte in wire:
        assert not ended.done()
        connection.data_received(bytes([byte]))
    connection.data_received(frame(1, 1, b"trailers", flags=5))

    assert received == [b"one", b"", b"three"]
    assert ended.done()
    assert transport.written.endswith(frame(6, 0, b"12345678", flags=1))  # a ping is answered


async def test_calls_of_a_connection_that_is_lost_fail() -> None:
    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(24)  # the preface
        writer.close()

    listener = await asyncio.start_server(close, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    _, connection = await asyncio.get_running_loop().create_connection(
        lambda: Connection("here", METHOD), "127.0.0.1", port
    )
    with pytest.raises(ConnectionError, match="closed the connection"):
        await connection.call(b"", lambda data: None)
    listener.close()


def test_a_clock_is_read_in_another_mapping_of_its_file(tmp_path: Path) -> None:
    ours, theirs = (StepClock(tmp_path / "clock", slots=3) for _ in range(2))
    assert [ours.tick() for _ in range(4)] == [0, 1, 2, 0]
    assert theirs.age_s(1, now=0.0) == ours.age_s(1, now=0.0) < 0
