"""A process of a stack that was up stops, hangs or cannot start: the stack serves again, by itself
or once the reason is gone. The stack has TLS inside and outside, and tokens."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from deploy.health import SERVING
from deploy.native.processes import running_processes
from deploy.native.status import format_status, stack_status
from nano_vllm_grpc import LLM, TLS, SamplingParams
from tests.certificates import Authority, Issued
from tests.stack import RealStack, UnmetPreconditionError, running_stack
from tests.waiting import WAIT_S, wait_for

TOKEN = "a-token-of-the-tests-0123456789"
PARAMS = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


@dataclass(frozen=True)
class Victim:
    stack: RealStack
    tls: TLS
    public: Authority
    shown: Issued
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
    shown = public.issue("server", "DNS:localhost", "IP:127.0.0.1")
    internal = within.issue("internal", "DNS:localhost")
    tokens = directory / "tokens"
    tokens.write_text(f"{TOKEN}\n")
    with running_stack(
        getattr(request, "param", None),
        kv_blocks=256,
        tls_cert=shown.cert,
        tls_key=shown.key,
        auth_tokens_file=tokens,
        internal_tls_cert=internal.cert,
        internal_tls_key=internal.key,
        internal_tls_ca=within.ca,
    ) as stack:
        yield Victim(stack, TLS(public.ca), public, shown, tokens)


@contextmanager
def certificate_without_its_key(victim: Victim) -> Iterator[str]:
    other = victim.public.issue("other", "DNS:localhost", "IP:127.0.0.1")
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
    stream.start()
    victim.stack.wait_load(lambda load: load.sampled_tokens > before + 5)
    stopped = getattr(victim, role)(f"{service}-0")
    stopped.suspend()
    if not stream.is_alive():
        stopped.resume()
        raise UnmetPreconditionError("the stream ended too early")
    assert not psutil.wait_procs([stopped], timeout=WAIT_S)[1]
    stream.join()
    assert found == [expected]
    victim.stack.wait_serving()
