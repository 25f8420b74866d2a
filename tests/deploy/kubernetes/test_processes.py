"""What the manifests start works together: requests over TLS with a token, and over HTTPS with
one, are answered by processes started as their containers are, on this host."""

from __future__ import annotations

import json
import signal
import ssl
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from nano_vllm_grpc import LLM, TLS, SamplingParams, UnauthenticatedError
from tests.deploy.kubernetes.cluster import TOKEN, Cluster, running
from tests.deploy.kubernetes.rendering import render_combination
from tests.waiting import wait_for

pytestmark = pytest.mark.system

PROMPT = "Once upon a time"
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    manifests = render_combination("cpu", ("cert-manager", "http"))
    with tempfile.TemporaryDirectory() as directory:
        found = Cluster(manifests, Path(directory))
        # A scheduler is healthy only with its ranks: as sidecars, these start first.
        with running(found, "engine/worker-0", "engine/scheduler"):
            yield found


@pytest.fixture
def group() -> Iterator[Cluster]:
    """Two ranks in pods of their own."""
    manifests = render_combination("tp-nodes", ("cert-manager",))
    with tempfile.TemporaryDirectory() as directory:
        found = Cluster(manifests, Path(directory))
        with running(found, "engine/worker-0", "engine/worker", "engine/scheduler"):
            yield found


def client(cluster: Cluster, token: str) -> LLM:
    frontend = cluster.processes["frontend/frontend"]
    address = f"localhost:{cluster.port('frontend-x', 50051)}"
    ca = cluster.file(frontend, frontend.settings.tls_cert)
    tls = TLS(str(ca), server_name="frontend.nano-vllm.svc")
    return LLM(address, tls=tls, token=token, max_retry_wait_s=30)


def test_clients_are_served_over_tls_with_a_token(cluster: Cluster) -> None:
    with running(cluster, "frontend/frontend") as (frontend,):
        with client(cluster, TOKEN) as llm:
            (completion,) = llm.generate([PROMPT], GREEDY)
            assert len(completion["token_ids"]) == 8
        with client(cluster, "another-door-to-try") as llm, pytest.raises(UnauthenticatedError):
            llm.generate([PROMPT], GREEDY)
        frontend.send_signal(signal.SIGTERM)
        assert frontend.wait(60) == 0


def test_ranks_of_two_pods_serve_together(group: Cluster) -> None:
    with running(group, "frontend/frontend"), client(group, TOKEN) as llm:
        (completion,) = llm.generate([PROMPT], GREEDY)
        assert len(completion["token_ids"]) == 8


def test_callers_are_served_over_https_with_a_token(cluster: Cluster) -> None:
    gateway = cluster.processes["http/gateway"]
    ca = cluster.file(gateway, gateway.settings.tls_cert)
    trust = ssl.create_default_context(cafile=str(ca))
    trust.check_hostname = False  # the name is the Service's
    trust.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # not signed by itself, as cert-manager's
    url = f"https://localhost:{cluster.port('http-x', 8443)}"

    def ask(path: str, body: dict[str, Any] | None = None, key: str = "") -> Any:
        headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        request = Request(url + path, json.dumps(body).encode() if body else None, headers)
        with urlopen(request, timeout=100, context=trust) as response:
            return json.load(response)

    def is_ready() -> bool:
        try:
            return bool(ask("/readiness"))
        except OSError:
            return False

    completion = {"model": "demo", "prompt": PROMPT, "max_tokens": 8}
    with running(cluster, "http/frontend", "http/gateway"):
        wait_for(is_ready, "the gateway")
        assert ask("/v1/completions", completion, TOKEN)["usage"]["completion_tokens"] == 8
        for path, body, key in (
            ("/v1/completions", completion, "guessed"),
            ("/workers", None, TOKEN),
            ("/workers", None, ""),
        ):
            with pytest.raises(HTTPError, match="401"):
                ask(path, body, key)
