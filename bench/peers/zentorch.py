"""Runs vLLM with zentorch, AMD's extension of PyTorch, which vLLM uses by itself where it can."""

from __future__ import annotations

from bench.errors import BenchError
from bench.peers.driver import main
from bench.peers.vllm import serve

if __name__ == "__main__":
    from vllm.platforms import current_platform  # after bench.peers.vllm, which sets variables

    if not current_platform.is_zen_cpu():
        raise BenchError("vLLM uses zentorch only on AMD's CPUs with AVX-512")
    main(serve)
