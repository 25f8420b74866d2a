"""TLS and mutual TLS over real gRPC, with certificates that change while the server runs."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc import aio

from frontend.service import Frontend
from frontend.settings import FrontendSettings
from nano_vllm_grpc.channels import open_channel, stays_on_host
from nano_vllm_grpc.pb import frontend_pb2 as pb
from nano_vllm_grpc.pb.frontend_pb2_grpc import InferenceServiceStub
from nano_vllm_grpc.tls import ClientTls, FileError, channel_credentials
from scheduler_svc.settings import SchedulerSettings
from shared.config import load_settings
from shared.rpc.server import Server
from tests.certificates import Authority, Issued, replace
from tests.echo_server import echo_server

TIMEOUT_S = 60


@pytest.fixture(scope="module")
def stranger(certificates: Path) -> Authority:
    return Authority(certificates, "theirs")


@pytest.fixture
def server(authority: Authority) -> Issued:
    return authority.issue("server", "DNS:llm.example.com", "IP:127.0.0.1")


async def say_hello(address: str, tls: ClientTls | None) -> str:
    async with open_channel(address, tls) as channel:
        stub = InferenceServiceStub(channel)
        answer = await stub.Detokenize(pb.DetokenizeRequest(), timeout=TIMEOUT_S)
        return str(answer.text)


async def is_refused(address: str, tls: ClientTls | None) -> None:
    with pytest.raises(aio.AioRpcError) as raised:
        await say_hello(address, tls)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_server_presents_its_certificate(
    authority: Authority, stranger: Authority, server: Issued
) -> None:
    async with echo_server(tls_cert=server.cert, tls_key=server.key) as (address, _):
        assert await say_hello(address, ClientTls(authority.ca)) == "hello"
        by_name = ClientTls(authority.ca, server_name="llm.example.com")
        assert await say_hello(address, by_name) == "hello"
        await is_refused(address, None)
        await is_refused(address, ClientTls(stranger.ca))
        await is_refused(address, ClientTls(authority.ca, server_name="elsewhere.example.com"))


async def test_certificates_are_replaced_without_a_restart(
    authority: Authority, stranger: Authority, server: Issued
) -> None:
    successor = stranger.issue("server", "IP:127.0.0.1")
    async with (
        echo_server(tls_cert=server.cert, tls_key=server.key) as (address, echo),
        open_channel(address, ClientTls(authority.ca)) as channel,
    ):
        stream = InferenceServiceStub(channel).GenerateStream(pb.GenerateRequest())
        assert (await stream.read()).text == "open"
        replace(server.cert, successor.cert)  # its key is still the old one: it changes nothing
        assert await say_hello(address, ClientTls(authority.ca)) == "hello"
        replace(server.key, successor.key)
        assert await say_hello(address, ClientTls(stranger.ca)) == "hello"
        await is_refused(address, ClientTls(authority.ca))
        echo.finish.set()
        assert (await stream.read()).text == "done"  # connections that exist go on


async def test_with_a_client_ca_clients_must_present_a_certificate(
    authority: Authority, stranger: Authority, server: Issued, tmp_path: Path
) -> None:
    ca = str(tmp_path / "clients.pem")
    replace(ca, authority.ca)
    old, new = authority.issue("client", "DNS:c"), stranger.issue("client", "DNS:c")
    files = {"tls_cert": server.cert, "tls_key": server.key, "tls_client_ca": ca}
    async with echo_server(**files) as (address, _):
        for allowed, rejected in ((old, new), (new, old)):
            tls = ClientTls(authority.ca, allowed.cert, allowed.key)
            assert await say_hello(address, tls) == "hello"
            await is_refused(address, ClientTls(authority.ca))
            await is_refused(address, ClientTls(authority.ca, rejected.cert, rejected.key))
            replace(ca, stranger.ca)


def unusable(
    authority: Authority, server: Issued, tmp_path: Path
) -> Iterator[tuple[dict[str, str], str]]:
    other = authority.issue("other", "DNS:x")
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("no certificate")
    yield {"tls_cert": "/nowhere.pem", "tls_key": server.key}, "tls_cert.*nowhere.*No such file"
    yield {"tls_cert": server.cert, "tls_key": other.key}, "tls_key: .*KEY_VALUES_MISMATCH"
    yield {"tls_cert": str(garbage), "tls_key": server.key}, "tls_cert, tls_key: .*garbage"
    files = {"tls_cert": server.cert, "tls_key": server.key}
    yield {**files, "tls_client_ca": str(garbage)}, "tls_.*ca: .*garbage"
    internal = {"internal_tls_cert": server.cert, "internal_tls_key": "/nowhere.pem"}
    yield {**internal, "internal_tls_ca": authority.ca}, "internal_tls_key.*nowhere"


async def test_unusable_files_stop_the_start(
    authority: Authority, server: Issued, tmp_path: Path
) -> None:
    for files, message in unusable(authority, server, tmp_path):
        flags = [f"--{name.replace('_', '-')}={path}" for name, path in files.items()]
        kind = SchedulerSettings if "internal_tls_cert" in files else FrontendSettings
        with pytest.raises(FileError, match=message):
            Server(load_settings(kind, flags), "a.Service")


async def test_an_authority_of_clients_and_services_stops_the_start(
    authority: Authority, stranger: Authority, server: Issued, tmp_path: Path
) -> None:
    """A client of it could pass for a service."""
    both = join(tmp_path / "both.pem", stranger.ca, authority.ca)
    files = {
        **{"tls_cert": server.cert, "tls_key": server.key, "tls_client_ca": both},
        **{"internal_tls_cert": server.cert, "internal_tls_key": server.key},
    }
    with pytest.raises(FileError, match=r"tls_client_ca, internal_tls_ca: .*both.pem and .*ours"):
        Frontend(frontend_settings(**files, internal_tls_ca=authority.ca))
    Frontend(
        frontend_settings(**files, internal_tls_ca=authority.ca, internal_tls_roles="required")
    )
    # Nor does it join later.
    ca = str(tmp_path / "clients.pem")
    replace(ca, stranger.ca)
    files |= {"tls_client_ca": ca, "internal_tls_ca": authority.ca}
    client, service = stranger.issue("client", "DNS:c"), authority.issue("client", "DNS:c")
    async with echo_server(**files) as (address, _):
        replace(ca, both)
        assert await say_hello(address, ClientTls(authority.ca, client.cert, client.key)) == "hello"
        await is_refused(address, ClientTls(authority.ca, service.cert, service.key))


def join(target: Path, *sources: str) -> str:
    target.write_text("".join(Path(source).read_text() for source in sources))
    return str(target)


def frontend_settings(**settings: str) -> FrontendSettings:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    return load_settings(FrontendSettings, flags)


def test_unusable_files_of_a_client_are_named(authority: Authority, server: Issued) -> None:
    with pytest.raises(FileError, match="nowhere"):
        channel_credentials(ClientTls("/nowhere.pem"))
    other = authority.issue("other", "DNS:x")
    with pytest.raises(FileError, match="KEY_VALUES_MISMATCH"):
        channel_credentials(ClientTls(authority.ca, server.cert, other.key))


def test_a_client_finds_its_files_in_the_environment() -> None:
    assert ClientTls.from_environment({}) is None
    given = {"NANO_TLS_CA": "a", "NANO_CLIENT_CERT": "b", "NANO_CLIENT_KEY": "c"}
    assert ClientTls.from_environment(given) == ClientTls("a", "b", "c")


async def test_only_this_user_may_connect_to_a_unix_socket(tmp_path: Path) -> None:
    server = Server(load_settings(FrontendSettings, []), "a.Service")
    await server.start(f"unix:{tmp_path}/s.sock")
    assert stat.S_IMODE((tmp_path / "s.sock").stat().st_mode) == 0o600
    (tmp_path / "file").touch()
    assert (tmp_path / "file").stat().st_mode & 0o400  # the process's umask is as it was
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) != 0o600
    await server.grpc.stop(None)


@pytest.mark.parametrize(
    ("address", "stays"),
    [
        ("127.0.0.1:1", True),
        ("127.9.9.9:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("unix:a.sock", True),
        ("unix-abstract:a", False),
        ("ipv4:127.0.0.1:1", True),
        ("dns:///localhost:1", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        (":::1", False),
        ("10.0.0.1:1", False),
        ("gpu-a:1", False),
        ("localhost.example.com:1", False),
        ("127.0.0.1.example.com:1", False),
    ],
)
def test_which_addresses_stay_on_the_host(address: str, stays: bool) -> None:
    assert stays_on_host(address) is stays
