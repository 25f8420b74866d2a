"""The files that prove and measure, and the runs that consist of several files."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
MODEL_SHAPE = "qwen3-0.6b"

_KERNELS = "tests/worker_svc/kernels/triton/test_"
_MEASUREMENTS = "bench/gpu/"

PROVE = (
    f"{_KERNELS}rms_norm.py",
    f"{_KERNELS}silu_mul.py",
    f"{_KERNELS}embedding.py",
    f"{_KERNELS}rope_store.py",
    f"{_KERNELS}quantized.py",
    f"{_KERNELS}quantized_cache.py",
    f"{_KERNELS}sampling.py",
    f"{_KERNELS}token_history.py",
    f"{_KERNELS}token_masks.py",
    f"{_KERNELS}filtering.py",
    f"{_KERNELS}attention.py",
    "tests/worker_svc/sampling/test_filters.py",
    "tests/worker_svc/gpu_path/test_backends.py",
    "tests/worker_svc/gpu_path/test_model.py",
    "tests/worker_svc/gpu_path/test_graphs.py",
    "tests/worker_svc/gpu_path/test_quantized_model.py",
    "tests/worker_svc/gpu_path/test_ranks.py",
    "tests/gpu/test_processes.py",
    "tests/gpu/test_sanitizer.py",
)
# Measurements run in this order. The bandwidth comes first, because others are compared with it.
# Measurements that only help to choose constants come last.
SWEEPS = (f"{_MEASUREMENTS}decode_sweeps_speed.py", f"{_MEASUREMENTS}prompt_sweeps_speed.py")
MEASURE = (
    f"{_MEASUREMENTS}ceilings_speed.py",
    f"{_MEASUREMENTS}decode_speed.py",
    f"{_MEASUREMENTS}step_speed.py",
    f"{_MEASUREMENTS}in_process_speed.py",
    f"{_MEASUREMENTS}stack_speed.py",
    f"{_MEASUREMENTS}linear_speed.py",
    f"{_MEASUREMENTS}quantized_products_speed.py",
    f"{_MEASUREMENTS}prompt_speed.py",
    f"{_MEASUREMENTS}features_speed.py",
    *SWEEPS,
)
# The first parts help to understand why a later part fails.
SMOKE = (
    f"{_MEASUREMENTS}smoke_device_speed.py",
    f"{_MEASUREMENTS}smoke_model_speed.py",
    f"{_MEASUREMENTS}stack_speed.py",
)
GROUPS = {"smoke": SMOKE, "prove": PROVE, "measure": MEASURE, "sweeps": SWEEPS}

# The files that need a model: `--model`, or one of the above shape with random weights.
WITH_MODEL = {"smoke_model", "step", "in_process", "stack"}


def module_name(path: str) -> str:
    return Path(path).stem.removeprefix("test_").removesuffix("_speed")


RUNS = GROUPS | {module_name(path): (path,) for path in (*PROVE, *MEASURE)}


def measures(path: str) -> bool:
    """Whether a file measures. Such a file runs alone on the GPU; other files run side by side."""
    return path.startswith(_MEASUREMENTS)
