"""`python -m worker_svc` as processes: start failures, and two ranks over Gloo."""

from __future__ import annotations

import itertools
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    LlamaForCausalLM,
    Olmo2ForCausalLM,
    Phi3ForCausalLM,
    Qwen2ForCausalLM,
    Qwen3MoeForCausalLM,
    SmolLM3ForCausalLM,
)

from deploy.health import CHANNEL_OPTIONS, SERVING, check_health
from deploy.ports import free_port
from shared.paging import Paging
from shared.pb.worker_pb2 import ConfigureRequest, GetInfoRequest, StepResponse
from shared.pb.worker_pb2_grpc import WorkerServiceStub
from tests.waiting import WAIT_S, wait_for
from tests.worker_svc.families import EXPERTS, GEMMA3
from tests.worker_svc.harness import Asked, Batch, batch_for, limits, save_model, worker_settings
from worker_svc.errors import SupersededError
from worker_svc.model_runner import ModelRunner
from worker_svc.ranks import distributed
from worker_svc.ranks.distributed import TensorParallel
from worker_svc.ranks.meeting import JOIN_TIMEOUT
from worker_svc.step.decode import decode_step
from worker_svc.step_result import StepResult

# Several loading ranks share the cores with other tests.
pytestmark = pytest.mark.timeout(400)

NUM_BLOCKS = 64
VOCAB = 301  # of the models and limits in harness.py

Workload = Callable[[Batch], list[Any]]


def address_of_an_interface() -> str:
    """The first address of an interface that is not loopback, if there is one."""
    for interface, addresses in psutil.net_if_addrs().items():
        ipv4 = [each.address for each in addresses if each.family == socket.AF_INET]
        up = psutil.net_if_stats()[interface].isup
        if up and ipv4 and not ipv4[0].startswith("127."):
            return ipv4[0]
    return "127.0.0.1"


def command(model: Path, *args: str) -> list[str]:
    flags = ["--model", str(model), "--threads", "1", "--device", "cpu", *args]
    return [sys.executable, "-m", "worker_svc", *flags]


class Ranks:
    """The ranks of one model, each a process that has loaded."""

    def __init__(self, model: Path, tp: int, directory: Path) -> None:
        addresses = [f"unix:{directory}/{rank}.sock" for rank in range(tp)]
        self.master_addr = address_of_an_interface()
        args = ["--tp", str(tp), "--master-addr", self.master_addr]
        args += ["--master-port", str(free_port()), "--worker-addresses", ",".join(addresses)]
        self.model = model
        self._channels = ExitStack()
        self._epochs = itertools.count(1)
        self.epoch = 0
        self.processes = [
            subprocess.Popen(command(model, "--rank", str(rank), *args)) for rank in range(tp)
        ]
        self.stubs = [self._dial(address) for address in addresses]

    def _dial(self, address: str) -> WorkerServiceStub:
        wait_for(lambda: check_health(address) == SERVING, f"{address} to be SERVING")
        channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        return WorkerServiceStub(self._channels.enter_context(channel))

    def next_epoch(self) -> ConfigureRequest:
        self.epoch = next(self._epochs)
        return ConfigureRequest(
            epoch=self.epoch, num_blocks=NUM_BLOCKS, max_num_seqs=8, max_num_batched_tokens=256
        )

    def configure(self, timeout_s: float = WAIT_S) -> None:
        """Begins a new epoch."""
        request = self.next_epoch()
        for future in [stub.Configure.future(request) for stub in self.stubs]:
            future.result(timeout=timeout_s)

    def execute(self, workload: Workload, num_steps: int | None = None) -> list[StepResponse]:
        """Runs steps in this epoch -> rank 0's answers; those of the others must hold nothing."""
        info = self.stubs[0].GetInfo(GetInfoRequest())
        paging = Paging(info.block_size, info.window, info.window_block_size)
        batch = Batch(limits(num_blocks=NUM_BLOCKS, paging=paging), epoch=self.epoch)
        requests = workload(batch)[:num_steps]

        def execute(stub: WorkerServiceStub) -> list[StepResponse]:
            return list(stub.Execute(iter(requests), timeout=WAIT_S))

        with ThreadPoolExecutor(len(self.stubs)) as pool:
            first, *others = pool.map(execute, self.stubs)
        for answer in (answer for other in others for answer in other):
            assert answer.token_ids == answer.logprob_ids == answer.logprob_values == b""
        return first

    def listening(self, rank: int) -> set[str]:
        """The IP addresses at which the processes of a rank take connections."""
        waiting = psutil.Process(self.processes[rank].pid)
        connections = (
            connection
            for process in (waiting, *waiting.children(recursive=True))
            for connection in process.net_connections("inet")
        )
        return {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}

    def close(self) -> None:
        self._channels.close()
        for process in self.processes:
            process.terminate()
        assert all(process.wait(WAIT_S) == 0 for process in self.processes)


def workload(batch: Batch) -> list[Any]:
    """Prompts in chunks beside decodes, half of them sampled with a temperature."""
    rng = np.random.default_rng(0)
    texts = [rng.integers(VOCAB, size=n).tolist() for n in (5, 40, 17, 64)]
    sampling = {"temperatures": [0.0, 0.8, 0.0, 1.2], "seeds": [1, 2, 3, 4]}
    steps = [
        batch.request([(i, text[:3]) for i, text in enumerate(texts)], silent=range(4)),
        batch.request([(i, text[3:]) for i, text in enumerate(texts)], **sampling),
    ]
    steps += [batch.request([(i, [-1 - i]) for i in range(4)], **sampling) for _ in range(30)]
    return steps


def workload_of_features(batch: Batch) -> list[Any]:
    """Prompts that are scored, then decodes one step ahead, every row with other features."""
    rng = np.random.default_rng(1)
    texts = [rng.integers(VOCAB, size=n).tolist() for n in (5, 40, 17, 64)]
    sampling: dict[str, Any] = {"temperatures": [0.0, 0.8, 0.9, 1.2], "seeds": [1, 2, 3, 4]}
    sampling["features"] = {
        0: Asked(repetition_penalty=1.5, frequency_penalty=0.3, prompt_len=5, logprobs=3),
        1: Asked(top_k=50, top_p=0.8, min_p=0.01, logprobs=0),
        2: Asked(bias={7: 2.0, 299: -np.inf}, allowed=range(0, VOCAB, 3)),
        3: Asked(presence_penalty=0.6, prompt_len=64, top_p=0.9, logprobs=VOCAB),
    }
    scored = {row: text[1:] for row, text in enumerate(texts) if row != 2}
    prompts = list(enumerate(texts))
    steps = [batch.request(prompts, **sampling, targets=scored, num_prompt_logprobs=2)]
    steps += [batch.request([(i, [-1 - i]) for i in range(4)], **sampling) for _ in range(20)]
    return steps


MODELS: dict[str, dict[str, Any]] = {
    # One key-value head for all ranks, and a vocabulary that no chunk divides.
    "qwen3": {"num_key_value_heads": 1, "attention_bias": True, "tie_word_embeddings": False},
    "qwen2": {"family": Qwen2ForCausalLM},
    "llama": {
        "family": LlamaForCausalLM,
        "hidden_size": 72,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 90,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "gemma3": {"family": Gemma3ForCausalLM, **GEMMA3},
    "experts": {"family": Qwen3MoeForCausalLM, **EXPERTS},  # an odd number of them
    # One key-value head for two ranks, in the norm of all keys.
    "olmo2": {"family": Olmo2ForCausalLM, "num_key_value_heads": 1},
    "smollm3": {"family": SmolLM3ForCausalLM, "no_rope_layers": [0, 1, 0]},
    # Partial heads, and one key-value head for two ranks.
    "phi3": {
        "family": Phi3ForCausalLM,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.75},
    },
}


def answers_of_one(model: Path, workload: Workload) -> list[StepResult]:
    runner, step = ModelRunner(worker_settings(model, device="cpu")), None
    runner.configure(1, NUM_BLOCKS)
    batch, found = batch_for(runner, NUM_BLOCKS), []
    for request in workload(batch):
        step = decode_step(request, batch.limits, step)
        found.append(runner.launch(step).wait())
    return found


@pytest.fixture(
    scope="module",
    params=[
        ("qwen3", 4),
        ("qwen2", 2),
        ("llama", 3),
        ("smollm3", 2),
        ("phi3", 2),
        ("gemma3", 2),
        ("experts", 2),
        ("olmo2", 2),
    ],
    ids=lambda param: f"{param[0]}-{param[1]}",
)
def several(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Ranks]:
    (name, tp), directory = request.param, tmp_path_factory.mktemp("several")
    save_model(directory / "model", **MODELS[name])
    started = Ranks(directory / "model", tp, directory)
    try:
        yield started
    finally:
        started.close()


@pytest.mark.parametrize("workload", [workload, workload_of_features])
def test_ranks_give_the_tokens_of_one(several: Ranks, workload: Workload) -> None:
    several.configure()
    ours = several.execute(workload)
    theirs = answers_of_one(several.model, workload)
    for answer, expected in zip(ours, theirs, strict=True):
        assert np.frombuffer(answer.token_ids, "<i4").tolist() == expected.token_ids.tolist()
        ids, values = (
            np.frombuffer(column, dtype)
            for column, dtype in ((answer.logprob_ids, "<i4"), (answer.logprob_values, "<f4"))
        )
        assert len(ids) == len(values)
        np.testing.assert_allclose(values, expected.logprob_values, atol=1e-4)
        # Less likely ones may swap places: sums over ranks round differently.
        assert ids[:6].tolist() == expected.logprob_ids[:6].tolist()


def test_ranks_listen_only_where_they_meet(several: Ranks) -> None:
    if several.master_addr == "127.0.0.1":
        pytest.skip("this host has loopback only")
    several.configure()
    assert several.execute(workload, num_steps=3)
    for rank in range(len(several.stubs)):
        assert several.listening(rank) == {several.master_addr}


def test_a_newer_epoch_ends_the_wait_for_other_ranks(several: Ranks) -> None:
    """This happens when a rank is killed before it has come to the meeting."""
    for rank in several.stubs:
        request = several.next_epoch()
        alone = rank.Configure.future(request)
        while rank.GetInfo(GetInfoRequest()).epoch < request.epoch:
            pass  # calls may overtake each other
    several.configure(timeout_s=JOIN_TIMEOUT.total_seconds() / 2)
    assert alone.exception().code() == grpc.StatusCode.UNAVAILABLE
    assert several.execute(workload, num_steps=3)


def test_a_newer_epoch_ends_the_wait_for_the_store_of_rank_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):  # `join` sets them
        monkeypatch.setenv(name, "lo")
    asked = itertools.count()
    with pytest.raises(SupersededError):
        distributed.Ranks(TensorParallel(1, 2)).join(
            1, torch.device("cpu"), "127.0.0.1", free_port(), lambda: next(asked) == 2
        )


def test_a_known_reason_not_to_start_is_one_line(tmp_path: Path) -> None:
    save_model(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("Qwen3ForCausalLM", "GPT2LMHeadModel"))
    process = subprocess.run(
        command(tmp_path, "--worker-addresses", f"unix:{tmp_path}/w.sock"),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert process.returncode == 2
    assert "Traceback" not in process.stderr
    last = json.loads(process.stderr.splitlines()[-1])
    assert (last["level"], last["event"]) == ("error", "cannot start")
    assert last["reason"].startswith("architectures: GPT2LMHeadModel")
