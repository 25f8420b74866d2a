"""vLLM's build for CPUs: its settings, and its HTTP server. Needs no vLLM in this process."""

from __future__ import annotations

from ctypes.util import find_library

from bench.peers.http_server import HOST, HttpServer, free_port

MAX_MODEL_LEN = 2048
VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "4",  # GiB
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",  # by default one core computes nothing
    "VLLM_NO_USAGE_STATS": "1",
}


def preloaded(prefix: str) -> list[str]:
    """The libraries that vLLM's manual advises for the engine's processes, tcmalloc if it is
    installed.

    Args:
        prefix: the directory of vLLM's environment.
    """
    return [f"{prefix}/lib/libiomp5.so", *filter(None, [find_library("tcmalloc_minimal")])]


def http_server(prefix: str, model: str, dtype: str) -> HttpServer:
    port = free_port()
    flags = {
        "model": model,
        "dtype": dtype,
        "max-model-len": MAX_MODEL_LEN,
        "host": HOST,
        "port": port,
    }
    command = [f"{prefix}/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
    return HttpServer(
        command + [word for name, value in flags.items() for word in (f"--{name}", str(value))],
        port,
        "/v1/completions",
        "max_tokens",
        {"return_token_ids": True},
        lambda event: event["choices"][0]["token_ids"] or (),
        lambda event: event["choices"][0]["finish_reason"] is not None,
        {**VARIABLES, "LD_PRELOAD": ":".join(preloaded(prefix))},
        "EngineCore",
    )
