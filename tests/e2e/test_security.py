"""A real stack with all security on: TLS outside, mutual TLS inside, tokens."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from nano_vllm_grpc import LLM, TLS, LLMError, SamplingParams
from nano_vllm_grpc.channels import open_blocking_channel
from tests.certificates import Authority, Issued, replace
from tests.stack import ROOT, RealStack, running_stack

TOKEN = "e2e-token-0123456789"
PARAMS = SamplingParams(temperature=0, max_tokens=8)
PROMPT = "Once upon a time"
TIMEOUT_S = 60


@dataclass(frozen=True)
class SecureStack:
    running: RealStack
    tls: TLS  # of its clients
    internal_ca: str
    internal: Issued

    @property
    def address(self) -> str:
        return self.running.address


@pytest.fixture(scope="module")
def stack(certificates: Path) -> Iterator[SecureStack]:
    public, within = Authority(certificates, "public"), Authority(certificates, "within")
    # Not the name that the launcher dials; it must cope all the same.
    shown = public.issue("server", "DNS:llm.example.com")
    internal = within.issue("internal", "DNS:localhost")
    tokens = certificates / "tokens"
    tokens.write_text(f"{TOKEN}\n")
    settings = {
        "tls_cert": shown.cert,
        "tls_key": shown.key,
        "tls_client_ca": public.ca,
        "auth_tokens_file": tokens,
        "internal_tls_cert": internal.cert,
        "internal_tls_key": internal.key,
        "internal_tls_ca": within.ca,
    }
    with running_stack(**settings) as running:
        client = public.issue("client", "DNS:client")
        tls = TLS(public.ca, client.cert, client.key, "llm.example.com")
        yield SecureStack(running, tls, within.ca, internal)


def generate(stack: SecureStack) -> str:
    with LLM(stack.address, tls=stack.tls, token=TOKEN) as llm:
        return llm.generate(PROMPT, PARAMS, use_tqdm=False)[0]["text"]


def test_examples_find_all_they_need_in_the_environment(stack: SecureStack) -> None:
    environment = {
        "PYTHONPATH": str(ROOT),
        "NANO_TLS_CA": stack.tls.ca,
        "NANO_CLIENT_CERT": stack.tls.cert,
        "NANO_CLIENT_KEY": stack.tls.key,
        "NANO_TLS_SERVER_NAME": stack.tls.server_name,
        "NANO_TOKEN": TOKEN,
    }
    for command, printed in (
        (["examples/stream.py", stack.address], r".+\n\[\w+, \d+ tokens\]\n"),
        (
            ["-m", "nano_vllm_grpc.chat", "--address", stack.address, "--max-tokens", "4"],
            r"[^\n]+; /help lists the commands\n.*\n\[\d tokens, [^\n]+\]\n",
        ),
        (["-m", "deploy.health", stack.address], "SERVING\n"),
    ):
        done = subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            env=environment,
            input="Hello\n",
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, done.stderr
        assert re.fullmatch(printed, done.stdout, re.DOTALL)


def test_a_token_is_not_sent_where_others_may_read_it() -> None:
    refused = pytest.raises(LLMError, match=r"token: .* would receive it in plaintext")
    with LLM("gpu-a.example.com:50051", token=TOKEN) as llm, refused:
        llm.get_model()


def test_services_follow_to_another_authority(stack: SecureStack, certificates: Path) -> None:
    """Only the scheduler restarts; the worker admits it by the new certificates, and the frontend
    connects to it with them."""
    successor = Authority(certificates, "successor")
    new = successor.issue("internal", "DNS:localhost")
    before = generate(stack)
    stack.internal.replace_by(new)
    replace(stack.internal_ca, successor.ca)
    with open_blocking_channel(stack.address, stack.tls, ()) as channel:
        health = HealthStub(channel).Watch(HealthCheckRequest(), timeout=TIMEOUT_S)
        assert next(health).status == HealthCheckResponse.SERVING
        stack.running.kill("scheduler")
        assert next(health).status == HealthCheckResponse.NOT_SERVING
        assert next(health).status == HealthCheckResponse.SERVING
        health.cancel()
    assert generate(stack) == before
