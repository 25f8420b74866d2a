"""Checks a service's health; `python -m deploy.health ADDRESS` is the containers' probe."""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request
from http.client import HTTPException

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from nano_vllm_grpc.channels import open_blocking_channel
from nano_vllm_grpc.tls import ClientTls, client_context

SERVING = "SERVING"
NOT_SERVING = "NOT_SERVING"
UNREACHABLE = "UNREACHABLE"
SILENT = "SILENT"

# Each check has its own connection: on a shared port, another process may answer next.
CHANNEL_OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))


def check_health(address: str, timeout_s: float = 2.0, tls: ClientTls | None = None) -> str:
    """Asks `grpc.health.v1.Health` at `address` (`host:port` or `unix:path`).

    Returns:
        `SERVING`, `NOT_SERVING`, `UNREACHABLE` if nothing listens, or `SILENT` if a process listens
        but does not answer within `timeout_s` seconds.
    """
    with open_blocking_channel(address, tls, CHANNEL_OPTIONS) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            late = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            return SILENT if late else UNREACHABLE
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))


def http_health(url: str, timeout_s: float = 2.0, tls: ClientTls | None = None) -> str:
    """Asks a frontend or the dashboard at `url` over HTTP; returns as `check_health`. With https,
    the server's certificate must be `tls.ca`, or signed by that, for any name."""
    try:
        fetch(f"{url}/health", timeout_s, tls)
        return SERVING
    except urllib.error.HTTPError:
        return NOT_SERVING
    except TimeoutError:
        return SILENT
    except (OSError, HTTPException):
        return UNREACHABLE


def frontend_health(address: str, url: str, tls: ClientTls | None = None) -> str:
    """Asks a frontend at `address` over gRPC and, if it serves, at `url` over HTTP; returns as
    `check_health`. Without a URL it has no HTTP."""
    health = check_health(address, tls=tls)
    return http_health(url, tls=tls) if url and health == SERVING else health


def fetch(url: str, timeout_s: float, tls: ClientTls | None = None) -> bytes:
    """Fetches a body from a process of the stack, without a proxy.

    Raises:
        OSError, HTTPException: there is none, or it does not come in time.
    """
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if tls and url.startswith("https:"):
        handlers.append(urllib.request.HTTPSHandler(context=client_context(tls)))
    direct = urllib.request.build_opener(*handlers)
    with direct.open(url, timeout=timeout_s) as answer:
        return bytes(answer.read())


def main() -> None:
    """Prints the health of the address or URL in the first argument; exit status 0 is SERVING.
    NANO_TLS_CA and the other settings of clients apply."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m deploy.health ADDRESS|URL")
    address = sys.argv[1]
    tls = ClientTls.from_environment()
    if address.startswith(("http://", "https://")):
        # A container's probe trusts the certificate of its own process.
        health = http_health(address, tls=tls or ClientTls(os.environ.get("NANO_TLS_CERT", "")))
    else:
        health = check_health(address, tls=tls)
    print(health)
    raise SystemExit(health != SERVING)


if __name__ == "__main__":
    main()
