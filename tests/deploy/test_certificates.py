"""The launcher's checks of certificates and tokens, before it starts anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.errors import LaunchError
from deploy.plan import Layout
from deploy.stack import Stack
from nano_vllm_grpc.tls import ClientTls
from tests.certificates import Authority

from .conftest import plan


def test_the_launcher_trusts_the_servers_own_certificate_under_its_name(
    authority: Authority, tmp_path: Path
) -> None:
    shown = authority.issue("server", "DNS:*.example.com", "DNS:other.example.org")
    files = {"TLS_CERT": shown.cert, "TLS_KEY": shown.key}
    stack, _ = plan(directory=tmp_path, HOST="0.0.0.0", TP="2", **files)
    assert stack.public_tls == ClientTls(shown.cert, server_name="any.example.com")
    assert stack.internal_tls is None
    stack.save()
    assert Stack.load(tmp_path) == stack


def test_clients_certificates(authority: Authority, certificates: Path) -> None:
    theirs = Authority(certificates, "theirs")
    shown, client = authority.issue("server", "DNS:a"), theirs.issue("client", "DNS:b")
    files = {"TLS_CERT": shown.cert, "TLS_KEY": shown.key}
    own = plan(**files, TLS_CLIENT_CA=authority.ca)[0].public_tls
    assert own == ClientTls(shown.cert, shown.cert, shown.key, "a")
    given = {"CLIENT_CERT": client.cert, "CLIENT_KEY": client.key}
    tls = plan(**files, TLS_CLIENT_CA=theirs.ca, **given)[0].public_tls
    assert tls == ClientTls(shown.cert, client.cert, client.key, "a")
    with pytest.raises(LaunchError, match="NANO_CLIENT_CERT and NANO_CLIENT_KEY"):
        plan(**files, TLS_CLIENT_CA=theirs.ca)


def test_an_internal_certificate_must_name_the_addresses(
    authority: Authority, certificates: Path
) -> None:
    inner = authority.issue("inner", "DNS:gpu-a")
    files = {"INTERNAL_TLS_CERT": inner.cert, "INTERNAL_TLS_KEY": inner.key}
    addresses = {"WORKER_ADDRESSES": "gpu-a:50053", "SCHEDULER_ADDRESS": "gpu-a:50052"}
    stack, _ = plan(**files, INTERNAL_TLS_CA=authority.ca, **addresses)
    assert stack.internal_tls == ClientTls(authority.ca, inner.cert, inner.key)
    with pytest.raises(LaunchError, match=r"internal_tls_cert: .*'localhost'"):
        plan(**files, INTERNAL_TLS_CA=authority.ca)
    stranger = Authority(certificates, "stranger")
    with pytest.raises(LaunchError, match=r"internal_tls_cert: .*unable to get local issuer"):
        plan(**files, INTERNAL_TLS_CA=stranger.ca, **addresses)


def test_clients_and_services_need_authorities_of_their_own(authority: Authority) -> None:
    shown = authority.issue("both", "DNS:localhost", "IP:127.0.0.1")
    files = {"TLS_CERT": shown.cert, "TLS_KEY": shown.key, "TLS_CLIENT_CA": authority.ca}
    files |= {"INTERNAL_TLS_CERT": shown.cert, "INTERNAL_TLS_KEY": shown.key}
    with pytest.raises(LaunchError, match=r"tls_client_ca, internal_tls_ca: .*same certificate"):
        plan(**files, INTERNAL_TLS_CA=authority.ca)


def test_an_internal_certificate_must_have_the_roles_of_this_host(authority: Authority) -> None:
    role = "URI:urn:nano-vllm-grpc:role:"
    inner = authority.issue("worker", f"{role}worker", "DNS:localhost", "DNS:gpu-a")
    files = {"INTERNAL_TLS_CERT": inner.cert, "INTERNAL_TLS_KEY": inner.key}
    files |= {"INTERNAL_TLS_CA": authority.ca}
    plan(Layout(services=("worker",)), **files)
    plan(Layout(services=("worker",)), **files, INTERNAL_TLS_ROLES="required")
    lacks = rf"internal_tls_cert: .*is for worker.*scheduler.*add .*{role}scheduler"
    with pytest.raises(LaunchError, match=lacks):
        plan(**files)
    plain = authority.issue("plain", "DNS:localhost")
    files |= {"INTERNAL_TLS_CERT": plain.cert, "INTERNAL_TLS_KEY": plain.key}
    plan(**files)
    with pytest.raises(LaunchError, match=r"internal_tls_cert: .*is for no role"):
        plan(**files, INTERNAL_TLS_ROLES="required")
    # A public certificate's first name may be one, and is not what the launcher expects.
    shown = authority.issue("shown", f"{role}frontend", "DNS:llm.example.com")
    stack, _ = plan(TLS_CERT=shown.cert, TLS_KEY=shown.key)
    assert stack.public_tls == ClientTls(shown.cert, server_name="llm.example.com")


def test_unusable_files(authority: Authority) -> None:
    shown = authority.issue("server", "DNS:a")
    with pytest.raises(LaunchError, match=r"tls_key: .*nowhere"):
        plan(TLS_CERT=shown.cert, TLS_KEY="/nowhere.pem")
    with pytest.raises(LaunchError, match=r"auth_tokens_file: cannot read /nowhere"):
        plan(AUTH_TOKENS_FILE="/nowhere")
    # Hosts without frontends need not have them.
    layout = Layout(services=("worker",))
    plan(layout, TLS_CERT="/nowhere", TLS_KEY="/nowhere", AUTH_TOKENS_FILE="/nowhere")
