"""`python -m tools.pictures`: draws charts in docs/pictures from the results in bench/results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib import rcParams

from bench.plot import write_load_plot, write_peers_plot, write_recovery_plot

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
PEERS = {
    "nano-int8-kv8": "nano-vllm-grpc, int8",
    "openvino-int8": "OpenVINO GenAI, int8",
    "llama-q8_0": "llama.cpp, Q8_0",
    "nano-int4": "nano-vllm-grpc, int4",
    "llama-q4_0": "llama.cpp, Q4_0",
    "nano-bf16": "nano-vllm-grpc, bfloat16",
    "vllm-bf16": "vLLM, bfloat16",
    "openvino-fp16": "OpenVINO GenAI, fp16",
}


def main() -> None:
    rcParams["svg.hashsalt"] = "the same ids in each run"
    peers = _result("2026-11-26-cpu-amd-epyc-peers-qwen3-0.6b")
    write_peers_plot(peers, PEERS, PICTURES / "peers.svg")
    write_load_plot(_result("2026-11-27-cpu-amd-epyc-load-smollm2"), PICTURES / "load.svg")
    write_recovery_plot(_result("2026-11-27-cpu-amd-epyc-recovery"), PICTURES / "recovery.svg")


def _result(name: str) -> dict[str, Any]:
    path = ROOT / "bench" / "results" / f"{name}.json"
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


if __name__ == "__main__":
    main()
