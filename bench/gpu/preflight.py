"""`python -m bench.gpu.preflight` prints, as JSON, this machine's GPU and the obstacles to
`bench.gpu`. It runs as a separate process because imports may crash."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

# The modules without which nothing can run.
TOOLS = ("psutil", "pytest", "xdist", "pytest_timeout", "torch")
# Each module imports the packages of its part of the stack, in the versions that generated code
# needs.
PARTS = (
    "nano_vllm_grpc",
    "cli.app",
    "frontend.service",
    "scheduler_svc.rpc.servicer",
    "worker_svc.server",
    "worker_svc.devices.cuda",
)
OPTIONAL = {"flash_attn": "FlashAttention 2", "flash_attn_interface": "FlashAttention 3"}
CAPABILITY = (8, 0)
LIMIT_S = 120.0


def examine() -> dict[str, Any]:
    """Calls `facts` in another process and returns its result."""
    command = [sys.executable, "-m", "bench.gpu.preflight"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    except subprocess.TimeoutExpired:
        return {"obstacles": [f"imports took over {LIMIT_S:.0f} s: try again, now in the cache"]}
    except subprocess.CalledProcessError as error:
        return {"obstacles": [f"imports: exit status {error.returncode}: {error.stderr[-2000:]}"]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def facts() -> dict[str, Any]:
    """The GPU and its software. `obstacles` prevent every run. Modules that are `missing` make some
    tests fail. `no_gpu` is the reason if no GPU can be used."""
    found: dict[str, Any] = {"obstacles": _failures(TOOLS), "missing": [], "no_gpu": ""}
    if found["obstacles"]:
        return found
    import torch

    found["missing"] = _failures(PARTS)
    found |= {"torch": torch.__version__, "cuda": torch.version.cuda}
    found |= {title: not _failures([module]) for module, title in OPTIONAL.items()}
    if not torch.cuda.is_available():
        found["no_gpu"] = (
            "torch finds no CUDA device: nvidia-smi says whether there is one; "
            "pytorch.org has a build of torch for each driver"
        )
        return found
    properties = torch.cuda.get_device_properties(0)
    capability = (properties.major, properties.minor)
    if capability < CAPABILITY:
        found["no_gpu"] = f"{properties.name}: its compute capability, {capability}, is below 8.0"
    return found | {
        "name": properties.name,
        "gpus": torch.cuda.device_count(),
        "memory_bytes": properties.total_memory,
        "capability": capability,
        "driver": _driver_version(),
    }


def _driver_version() -> str | None:
    """The NVIDIA driver's version, None if nvidia-smi does not say."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split("\n")[0].strip()


def _failures(names: Sequence[str]) -> list[str]:
    """Returns the modules that cannot be imported, each with the reason."""
    found = []
    for name in names:
        try:
            import_module(name)
        except Exception as error:
            found.append(f"{name}: {type(error).__name__}: {error}")
    return found


if __name__ == "__main__":
    print(json.dumps(facts()))
