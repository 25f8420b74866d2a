"""Runs ik_llama.cpp, a fork of llama.cpp with kernels of its own."""

from __future__ import annotations

from bench.peers.driver import main
from bench.peers.llama_cpp import serve

if __name__ == "__main__":
    main(serve)
