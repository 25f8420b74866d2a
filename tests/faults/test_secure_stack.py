"""A real stack with all security on: TLS outside, mutual TLS inside, clients with certificates and
tokens. A process of it stops, hangs or cannot start: it serves again, by itself or once the reason
is gone."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from deploy.health import SERVING
from deploy.native.processes import running_processes
from deploy.native.status import format_status, stack_status
from nano_vllm_grpc import LLM, TLS, LLMError, SamplingParams
from nano_vllm_grpc.channels import open_blocking_channel
from tests.certificates import Authority, Issued, replace
from tests.stack import ROOT, RealStack, running_stack
from tests.waiting import WAIT_S, wait_for

TOKEN = "a-token-of-the-tests-0123456789"
PARAMS = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


@dataclass(frozen=True)
class Victim:
    stack: RealStack
    tls: TLS  # of its clients
    public: Authority
    shown: Issued
    internal_ca: str
    internal: Issued
    tokens: Path

    def fork(self, name: str) -> psutil.Process:
        """The fork that serves."""
        pids = {each.name: each.pid for each in running_processes(self.stack.directory)}
        return psutil.Process(pids[name])

    def parent(self, name: str) -> psutil.Process:
        parent = self.fork(name).parent()
        assert parent is not None
        return parent

    def trouble(self, service: str) -> str:
        """The line of `make ps` for the service."""
        lines = format_status(stack_status(self.stack.stack)).splitlines()
        return next(line for line in lines if line.startswith(service))

    def health(self, service: str) -> str:
        (status,) = (
            each for each in stack_status(self.stack.stack) if each.process.service == service
        )
        return status.health

    def generate(self) -> str:
        with LLM(self.stack.address, tls=self.tls, token=TOKEN) as llm:
            return str(llm.generate("Once upon a time", PARAMS, use_tqdm=False)[0]["text"])


@pytest.fixture(scope="module")
def victim(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Victim]:
    directory = tmp_path_factory.mktemp("certificates")
    public, within = Authority(directory, "public"), Authority(directory, "within")
    # Not the name that the launcher dials; it must cope all the same.
    shown = public.issue("server", "DNS:llm.example.com")
    client = public.issue("client", "DNS:client")
    internal = within.issue("internal", "DNS:localhost")
    tokens = directory / "tokens"
    tokens.write_text(f"{TOKEN}\n")
    given = getattr(request, "param", {})
    environment = given | {"NANO_CLIENT_CERT": client.cert, "NANO_CLIENT_KEY": client.key}
    with running_stack(
        environment,
        kv_blocks=256,
        tls_cert=shown.cert,
        tls_key=shown.key,
        tls_client_ca=public.ca,
        auth_tokens_file=tokens,
        internal_tls_cert=internal.cert,
        internal_tls_key=internal.key,
        internal_tls_ca=within.ca,
    ) as stack:
        tls = TLS(public.ca, client.cert, client.key, "llm.example.com")
        yield Victim(stack, tls, public, shown, within.ca, internal, tokens)


@contextmanager
def certificate_without_its_key(victim: Victim) -> Iterator[str]:
    other = victim.public.issue("other", "DNS:llm.example.com")
    right = Path(victim.shown.key).read_bytes()
    shutil.copy(other.key, victim.shown.key)
    yield "tls_cert, tls_key"
    Path(victim.shown.key).write_bytes(right)


@contextmanager
def missing_tokens(victim: Victim) -> Iterator[str]:
    moved = victim.tokens.rename(victim.tokens.with_suffix(".moved"))
    yield "auth_tokens_file: "
    moved.rename(victim.tokens)


@contextmanager
def no_descriptors(victim: Victim) -> Iterator[str]:
    parent = victim.parent("frontend-0")
    _, hard = parent.rlimit(psutil.RLIMIT_NOFILE)
    parent.rlimit(psutil.RLIMIT_NOFILE, (3, hard))
    yield "Too many open files"
    parent.rlimit(psutil.RLIMIT_NOFILE, (hard, hard))


@contextmanager
def few_descriptors(victim: Victim) -> Iterator[str]:
    """Enough to fork, too few to serve."""
    parent = victim.parent("frontend-0")
    _, hard = parent.rlimit(psutil.RLIMIT_NOFILE)
    parent.rlimit(psutil.RLIMIT_NOFILE, (parent.num_fds() + 3, hard))
    yield "starts again in"
    parent.rlimit(psutil.RLIMIT_NOFILE, (hard, hard))


@contextmanager
def taken_address(victim: Victim) -> Iterator[str]:
    socket = victim.stack.directory / "scheduler.sock"
    socket.unlink()
    socket.mkdir()
    yield "cannot listen on "
    socket.rmdir()


@pytest.mark.parametrize(
    ("fault", "service"),
    [
        (certificate_without_its_key, "frontend"),
        (missing_tokens, "frontend"),
        (no_descriptors, "frontend"),
        (few_descriptors, "frontend"),
        (taken_address, "scheduler"),
    ],
)
def test_what_keeps_a_successor_from_starting_is_said_and_not_final(
    victim: Victim, fault: object, service: str
) -> None:
    assert callable(fault)
    parent = victim.parent(f"{service}-0")
    with fault(victim) as reason:
        victim.fork(f"{service}-0").kill()
        wait_for(lambda: reason in victim.trouble(service), f"ps to say {reason}")
        assert victim.health(service) != SERVING
    victim.stack.wait_serving()
    assert victim.generate()
    assert victim.parent(f"{service}-0") == parent
    assert "starts again" not in victim.trouble(service)


def test_a_parent_whose_successor_cannot_start_is_not_final(victim: Victim) -> None:
    with missing_tokens(victim) as reason:
        victim.parent("frontend-0").kill()
        for said in (f"starts again soon: {reason}", f"is starting again: {reason}"):
            wait_for(lambda said=said: said in victim.trouble("frontend"), f"ps to say: {said}")
    victim.stack.wait_serving()
    assert victim.generate()


def test_examples_find_all_they_need_in_the_environment(victim: Victim) -> None:
    environment = {
        "PYTHONPATH": str(ROOT),
        "NANO_TLS_CA": victim.tls.ca,
        "NANO_CLIENT_CERT": victim.tls.cert,
        "NANO_CLIENT_KEY": victim.tls.key,
        "NANO_TLS_SERVER_NAME": victim.tls.server_name,
        "NANO_TOKEN": TOKEN,
    }
    address = victim.stack.address
    for command, printed in (
        (["examples/stream.py", address], r".+\n\[\w+, \d+ tokens\]\n"),
        (
            ["-m", "nano_vllm_grpc.chat", "--address", address, "--max-tokens", "4"],
            r"[^\n]+; /help lists the commands\n.*\n\[\d tokens, [^\n]+\]\n",
        ),
        (["-m", "deploy.health", address], "SERVING\n"),
    ):
        done = subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment,
            input="Hello\n",
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
        assert done.returncode == 0, done.stderr
        assert re.fullmatch(printed, done.stdout, re.DOTALL)


def test_a_token_is_not_sent_where_others_may_read_it() -> None:
    refused = pytest.raises(LLMError, match=r"token: .* would receive it in plaintext")
    with LLM("gpu-a.example.com:50051", token=TOKEN) as llm, refused:
        llm.get_model()


def test_services_follow_to_another_authority(victim: Victim) -> None:
    """Only the scheduler restarts; the worker admits it by the new certificates, and the frontend
    connects to it with them."""
    successor = Authority(victim.tokens.parent, "successor")
    before = victim.generate()
    victim.internal.replace_by(successor.issue("internal", "DNS:localhost"))
    replace(victim.internal_ca, successor.ca)
    with open_blocking_channel(victim.stack.address, victim.tls, ()) as channel:
        health = HealthStub(channel).Watch(HealthCheckRequest(), timeout=WAIT_S)
        assert next(health).status == HealthCheckResponse.SERVING
        victim.stack.kill("scheduler")
        assert next(health).status == HealthCheckResponse.NOT_SERVING
        assert next(health).status == HealthCheckResponse.SERVING
        health.cancel()
    assert victim.generate() == before


@pytest.mark.parametrize("victim", [{"NANO_HANG_TIMEOUT_S": "3"}], ids=["3 s"], indirect=True)
@pytest.mark.parametrize("service", ["frontend", "scheduler", "worker"])
@pytest.mark.parametrize("role", ["fork", "parent"])
def test_a_process_that_is_stopped_is_replaced_and_streams_go_on(
    victim: Victim, service: str, role: str
) -> None:
    expected = victim.generate()
    found: list[str] = []
    stream = threading.Thread(target=lambda: found.append(victim.generate()))
    before = victim.stack.load().sampled_tokens
    with victim.stack.hold.after(10):
        stream.start()
        victim.stack.wait_load(lambda load: load.sampled_tokens > before + 5)
        stopped = getattr(victim, role)(f"{service}-0")
        stopped.suspend()
    assert not psutil.wait_procs([stopped], timeout=WAIT_S)[1]
    stream.join()
    assert found == [expected]
    victim.stack.wait_serving()
