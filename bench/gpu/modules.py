"""Lists the files that prove and measure, in the order of the tables."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODEL_SHAPE = "qwen3-0.6b"


@dataclass(frozen=True)
class Module:
    """A file of tests or measurements, which runs in a process of its own."""

    path: str  # from ROOT, or absolute
    limit_s: float
    measures: bool = False  # alone on the GPU; the others prove, and run side by side
    needs_model: bool = False  # the shape above with random weights, or --model
    compiles: bool = True  # kernels of its own: run once beforehand, with the other measurements
    smoke: bool = False  # little of it

    @property
    def name(self) -> str:
        return Path(self.path).stem.removeprefix("test_").removesuffix("_speed")


_KERNELS = "tests/worker_svc/kernels/triton/test_"

# In the order of the tables, in which measurements also run: bandwidth first, since others are
# compared with it; last, whatever only helps to choose constants.
MODULES = (
    Module(f"{_KERNELS}rms_norm.py", 200),
    Module(f"{_KERNELS}silu_mul.py", 200),
    Module(f"{_KERNELS}embedding.py", 200),
    Module(f"{_KERNELS}rope_store.py", 240),
    Module(f"{_KERNELS}quantized.py", 400),
    Module(f"{_KERNELS}quantized_cache.py", 240),
    Module(f"{_KERNELS}sampling.py", 240),
    Module(f"{_KERNELS}token_history.py", 200),
    Module(f"{_KERNELS}token_masks.py", 200),
    Module(f"{_KERNELS}filtering.py", 240),
    Module(f"{_KERNELS}decode_attention.py", 400),
    Module(f"{_KERNELS}prompt_attention.py", 400),
    Module("tests/worker_svc/sampling/test_filters.py", 240),
    Module("tests/worker_svc/gpu_path/test_backends.py", 400),
    Module("tests/worker_svc/gpu_path/test_model.py", 400),
    Module("tests/worker_svc/gpu_path/test_graphs.py", 400),
    Module("tests/worker_svc/gpu_path/test_quantized_model.py", 300),
    Module("tests/worker_svc/gpu_path/test_ranks.py", 300),
    Module("tests/gpu/test_processes.py", 400),
    Module("tests/gpu/test_sanitizer.py", 400),
    Module("bench/gpu/ceilings_speed.py", 40, measures=True),
    Module("bench/gpu/decode_speed.py", 80, measures=True),
    Module("bench/gpu/step_speed.py", 90, measures=True, needs_model=True),
    Module("bench/gpu/in_process_speed.py", 170, measures=True, needs_model=True),
    Module("bench/gpu/stack_speed.py", 150, measures=True, needs_model=True, compiles=False),
    Module("bench/gpu/linear_speed.py", 45, measures=True),
    Module("bench/gpu/quantized_products_speed.py", 60, measures=True),
    Module("bench/gpu/prompt_speed.py", 60, measures=True),
    Module("bench/gpu/features_speed.py", 45, measures=True),
    Module("bench/gpu/decode_sweeps_speed.py", 75, measures=True),
    Module("bench/gpu/prompt_sweeps_speed.py", 45, measures=True),
)

_SMOKE = {"measures": True, "compiles": False, "smoke": True}

# In this order, one by one: first what is needed to understand why a later one fails.
SMOKE = (
    Module("bench/gpu/smoke_device_speed.py", 60, **_SMOKE),
    Module("bench/gpu/smoke_model_speed.py", 200, needs_model=True, **_SMOKE),
    Module("bench/gpu/stack_speed.py", 120, needs_model=True, **_SMOKE),
)
