"""`python -m worker_svc` as processes: start failures, and two ranks over Gloo."""

from __future__ import annotations

import itertools
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest

from deploy.health import CHANNEL_OPTIONS, SERVING, check_health
from deploy.ports import free_port
from shared.pb.worker_pb2 import ConfigureRequest, GetInfoRequest, StepResponse
from shared.pb.worker_pb2_grpc import WorkerServiceStub
from tests.waiting import WAIT_S, wait_for
from tests.worker_svc.harness import Asked, Batch, limits, save_model
from tests.worker_svc.quantization.writers import FORMATS, save_quantized
from worker_svc.distributed import JOIN_TIMEOUT

# Several loading ranks share the cores with other tests.
pytestmark = pytest.mark.timeout(400)

NUM_BLOCKS = 64
ALL, FIRST = slice(None), slice(3)  # steps of a workload

Workload = Callable[[int, int], list[Any]]  # of an epoch and a vocabulary's size


def address_of_another_interface() -> str:
    """The first address of an interface that is not loopback."""
    for interface, addresses in psutil.net_if_addrs().items():
        ipv4 = [each.address for each in addresses if each.family == socket.AF_INET]
        up = psutil.net_if_stats()[interface].isup
        if up and ipv4 and not ipv4[0].startswith("127."):
            return ipv4[0]
    pytest.skip("this host has loopback only")


def command(model: Path, *args: str) -> list[str]:
    flags = ["--model", str(model), "--threads", "1", "--device", "cpu", *args]
    return [sys.executable, "-m", "worker_svc", *flags]


class Ranks:
    """The ranks of one model, each a process."""

    def __init__(
        self, model: Path, tp: int, directory: Path, master_addr: str = "127.0.0.1"
    ) -> None:
        self._addresses = [f"unix:{directory}/{rank}.sock" for rank in range(tp)]
        self._args = ["--tp", str(tp), "--master-addr", master_addr]
        self._args += ["--master-port", str(free_port())]
        self._args += ["--worker-addresses", ",".join(self._addresses)]
        self._model = model
        self._channels = ExitStack()
        self._epochs = itertools.count(1)
        self.epoch = 0
        self.processes = [self._spawn(rank) for rank in range(tp)]
        self.stubs = [self._dial(rank) for rank in range(tp)]

    def _spawn(self, rank: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command(self._model, "--rank", str(rank), *self._args))

    def _dial(self, rank: int) -> WorkerServiceStub:
        """A client of a rank that has loaded."""
        address = self._addresses[rank]
        wait_for(lambda: check_health(address) == SERVING, f"rank {rank} to be SERVING")
        # With a connection of its own: an earlier one may lead to a process that has just died.
        channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        return WorkerServiceStub(self._channels.enter_context(channel))

    def restart(self, rank: int) -> None:
        self.processes[rank] = self._spawn(rank)
        self.stubs[rank] = self._dial(rank)

    def dial_again(self) -> None:
        self.stubs = [self._dial(rank) for rank in range(len(self.stubs))]

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

    def execute(self, workload: Workload, steps: slice = ALL) -> list[StepResponse]:
        """Runs a workload's steps in this epoch -> rank 0's answers; those of the others must hold
        nothing."""
        requests = workload(self.epoch, 301)[steps]

        def execute(stub: WorkerServiceStub) -> list[StepResponse]:
            return list(stub.Execute(iter(requests), timeout=WAIT_S))

        with ThreadPoolExecutor(len(self.stubs)) as pool:
            first, *others = pool.map(execute, self.stubs)
        for answer in (answer for other in others for answer in other):
            assert answer.token_ids == answer.logprob_ids == answer.logprob_values == b""
        return first

    def run(self, steps: slice = ALL) -> list[list[int]]:
        """Runs steps of the plain workload -> the tokens."""
        answers = self.execute(workload, steps)
        return [np.frombuffer(answer.token_ids, "<i4").tolist() for answer in answers]

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


@contextmanager
def ranks(model: Path, tp: int, directory: Path, master_addr: str = "127.0.0.1") -> Iterator[Ranks]:
    directory.mkdir()
    started = Ranks(model, tp, directory, master_addr)
    try:
        yield started
    finally:
        started.close()


def workload(epoch: int, vocab: int) -> list[Any]:
    """Prompts in chunks beside decodes, half of them sampled with a temperature."""
    batch = Batch(limits(num_blocks=NUM_BLOCKS, vocab_size=vocab), epoch=epoch)
    rng = np.random.default_rng(0)
    texts = [rng.integers(vocab, size=n).tolist() for n in (5, 40, 17, 64)]
    sampling = {"temperatures": [0.0, 0.8, 0.0, 1.2], "seeds": [1, 2, 3, 4]}
    steps = [
        batch.request([(i, text[:3]) for i, text in enumerate(texts)], silent=range(4)),
        batch.request([(i, text[3:]) for i, text in enumerate(texts)], **sampling),
    ]
    steps += [batch.request([(i, [-1 - i]) for i in range(4)], **sampling) for _ in range(30)]
    return steps


def workload_of_features(epoch: int, vocab: int) -> list[Any]:
    """Prompts that are scored, then decodes one step ahead, every row with other features."""
    batch = Batch(limits(num_blocks=NUM_BLOCKS, vocab_size=vocab), epoch=epoch)
    rng = np.random.default_rng(1)
    texts = [rng.integers(vocab, size=n).tolist() for n in (5, 40, 17, 64)]
    sampling: dict[str, Any] = {"temperatures": [0.0, 0.8, 0.9, 1.2], "seeds": [1, 2, 3, 4]}
    sampling["features"] = {
        0: Asked(repetition_penalty=1.5, frequency_penalty=0.3, prompt_len=5, logprobs=3),
        1: Asked(top_k=50, top_p=0.8, min_p=0.01, logprobs=0),
        2: Asked(bias={7: 2.0, 299: -np.inf}, allowed=range(0, vocab, 3)),
        3: Asked(presence_penalty=0.6, prompt_len=64, top_p=0.9, logprobs=vocab),
    }
    scored = {row: text[1:] for row, text in enumerate(texts) if row != 2}
    prompts = list(enumerate(texts))
    steps = [batch.request(prompts, **sampling, targets=scored, num_prompt_logprobs=2)]
    steps += [batch.request([(i, [-1 - i]) for i in range(4)], **sampling) for _ in range(20)]
    return steps


@pytest.fixture(scope="module")
def odd_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One key-value head for all ranks, biases, and a vocabulary that no chunk divides."""
    path = tmp_path_factory.mktemp("odd")
    save_model(path, num_key_value_heads=1, attention_bias=True, tie_word_embeddings=False)
    return path


@dataclass(frozen=True)
class OneRank:
    """Its answers to the workloads."""

    tokens: list[list[int]]
    of_features: list[StepResponse]


@pytest.fixture(scope="module")
def one(odd_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with ranks(odd_model, 1, tmp_path_factory.mktemp("one") / "1") as started:
        yield started


@pytest.fixture(scope="module")
def two(odd_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with ranks(odd_model, 2, tmp_path_factory.mktemp("two") / "2") as started:
        yield started


@pytest.fixture(scope="module")
def one_rank(one: Ranks) -> OneRank:
    one.configure()
    tokens = one.run()
    one.configure()
    return OneRank(tokens, one.execute(workload_of_features))


def check_tokens(several: Ranks, one_rank: OneRank) -> None:
    several.configure()
    assert several.run() == one_rank.tokens
    several.configure()
    answers = several.execute(workload_of_features)
    for ours, theirs in zip(answers, one_rank.of_features, strict=True):
        assert ours.token_ids == theirs.token_ids
        values = [np.frombuffer(each.logprob_values, "<f4") for each in (ours, theirs)]
        assert len(values[0]) == len(np.frombuffer(ours.logprob_ids, "<i4"))
        np.testing.assert_allclose(values[0], values[1], atol=1e-4)
        # Less likely ones may swap places: sums over ranks round differently.
        assert ours.logprob_ids[:24] == theirs.logprob_ids[:24]


def test_two_ranks_give_the_tokens_of_one(two: Ranks, one_rank: OneRank) -> None:
    check_tokens(two, one_rank)


def test_four_ranks_give_the_tokens_of_one(
    odd_model: Path, tmp_path: Path, one_rank: OneRank
) -> None:
    with ranks(odd_model, 4, tmp_path / "ranks") as four:
        check_tokens(four, one_rank)


def check_addresses(two: Ranks, address: str) -> None:
    two.configure()
    assert two.run(FIRST)
    assert [two.listening(rank) for rank in (0, 1)] == [{address}, {address}]


def test_ranks_listen_only_on_loopback(two: Ranks) -> None:
    check_addresses(two, "127.0.0.1")


def test_ranks_listen_only_where_they_meet(odd_model: Path, tmp_path: Path) -> None:
    address = address_of_another_interface()
    with ranks(odd_model, 2, tmp_path / "2", address) as elsewhere:
        check_addresses(elsewhere, address)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_restarted_rank_joins_the_survivor(two: Ranks, lost: int) -> None:
    survivor = 1 - lost
    two.configure()
    expected = two.run(FIRST)
    incarnation = two.stubs[survivor].GetInfo(GetInfoRequest()).incarnation
    two.processes[lost].kill()
    two.processes[lost].wait()
    with pytest.raises(grpc.RpcError) as error:
        list(two.stubs[survivor].Execute(iter(workload(two.epoch, 301)[3:4]), timeout=WAIT_S))
    assert error.value.code() == grpc.StatusCode.INTERNAL
    two.restart(lost)
    two.configure()
    assert two.run(FIRST) == expected
    assert two.stubs[survivor].GetInfo(GetInfoRequest()).incarnation == incarnation


def test_nobody_is_waited_for_once_a_newer_epoch_begins(two: Ranks) -> None:
    """This happens when a rank is killed before it has come to the meeting."""
    for rank in two.stubs:
        request = two.next_epoch()
        alone = rank.Configure.future(request)
        while rank.GetInfo(GetInfoRequest()).epoch < request.epoch:
            pass  # calls may overtake each other
    two.configure(timeout_s=JOIN_TIMEOUT.total_seconds() / 2)
    assert alone.exception().code() == grpc.StatusCode.UNAVAILABLE
    assert two.run(FIRST)


def test_a_fork_takes_the_place_of_one_that_died(one: Ranks) -> None:
    one.configure()
    expected = one.run(FIRST)
    before = one.stubs[0].GetInfo(GetInfoRequest()).incarnation
    (serving,) = psutil.Process(one.processes[0].pid).children()
    serving.kill()
    psutil.wait_procs([serving])
    one.dial_again()
    one.configure()
    assert one.run(FIRST) == expected
    assert one.stubs[0].GetInfo(GetInfoRequest()).incarnation != before
    assert one.processes[0].poll() is None


def reason_not_to_start(model: Path, *args: str) -> str:
    """The one line that says why a worker ends."""
    process = subprocess.run(
        command(model, "--worker-addresses", f"unix:{model}/w.sock", "--log-format", "json", *args),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert process.returncode == 2
    assert "Traceback" not in process.stderr
    last = json.loads(process.stderr.splitlines()[-1])
    assert (last["level"], last["event"]) == ("error", "cannot start")
    return str(last["reason"])


def test_a_known_reason_not_to_start_is_one_line(tmp_path: Path) -> None:
    save_model(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("Qwen3ForCausalLM", "GPT2LMHeadModel"))
    assert reason_not_to_start(tmp_path).startswith("architectures: GPT2LMHeadModel")


def test_a_format_that_is_not_the_checkpoints_is_refused(tmp_path: Path) -> None:
    save_quantized(tmp_path, FORMATS["W8A8"])
    reason = reason_not_to_start(tmp_path, "--quantization", "int4")
    assert reason == "quantization: int4, but the checkpoint is int8 (compressed-tensors)"
