"""The files that prove and measure, and a run of pytest over some of them, within a time limit."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from bench.gpu.records import append

LIMIT_S = 470.0
TEST_LIMIT_S, MEASUREMENT_LIMIT_S = 120, 170  # if there is no `pytest.mark.timeout`
SIDE_BY_SIDE = 6  # proving processes, which together fit into a GPU's memory
REHEARSED_MODEL = ("--shape", "tiny", "--set", "num_hidden_layers=1")
# Each of these variables makes the references' float32 products less exact.
ROUGH_PRODUCTS = ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE")
_POLL_S = 0.2
VARIABLE = "GPU_CHECK"  # JSON: the records' path, and the arguments of `Setup`
ROOT = Path(__file__).parents[2]
MODEL_SHAPE = "qwen3-0.6b"

_KERNELS = "tests/worker_svc/kernels/triton/test_"
_MEASUREMENTS = "bench/gpu/"

PROVE = (
    f"{_KERNELS}rms_norm.py",
    f"{_KERNELS}gated_activation.py",
    f"{_KERNELS}embedding.py",
    f"{_KERNELS}rope_store.py",
    f"{_KERNELS}advance.py",
    f"{_KERNELS}row_matmul.py",
    f"{_KERNELS}thin_matmul.py",
    f"{_KERNELS}quantized.py",
    f"{_KERNELS}quantized_cache.py",
    f"{_KERNELS}sampling.py",
    f"{_KERNELS}token_history.py",
    f"{_KERNELS}token_masks.py",
    f"{_KERNELS}filtering.py",
    f"{_KERNELS}attention.py",
    f"{_KERNELS}batch_invariance.py",
    "tests/worker_svc/sampling/test_filters.py",
    "tests/worker_svc/gpu_path/test_backends.py",
    "tests/worker_svc/gpu_path/test_model.py",
    "tests/worker_svc/gpu_path/test_graphs.py",
    "tests/worker_svc/gpu_path/test_prompt_graphs.py",
    "tests/worker_svc/gpu_path/test_quantized_model.py",
    "tests/worker_svc/gpu_path/test_ranks.py",
    "tests/worker_svc/test_kept_memory.py",
    "tests/gpu/test_processes.py",
    "tests/gpu/test_sanitizer.py",
)
# Measurements run in this order. The bandwidth comes first, because others are compared with it.
# Measurements that only help to choose constants come last.
SWEEPS = (f"{_MEASUREMENTS}sweeps_speed.py",)
MEASURE = (
    f"{_MEASUREMENTS}ceilings_speed.py",
    f"{_MEASUREMENTS}attention_speed.py",
    f"{_MEASUREMENTS}step_speed.py",
    f"{_MEASUREMENTS}stack_speed.py",
    f"{_MEASUREMENTS}products_speed.py",
    *SWEEPS,
)
SMOKE = (f"{_MEASUREMENTS}smoke_speed.py", f"{_MEASUREMENTS}stack_speed.py")
GROUPS = {"smoke": SMOKE, "prove": PROVE, "measure": MEASURE}

# The files that need a model: `--model`, or one of the above shape with random weights.
WITH_MODEL = {"smoke", "step", "stack"}


def module_name(path: str) -> str:
    return Path(path).stem.removeprefix("test_").removesuffix("_speed")


RUNS = GROUPS | {module_name(path): (path,) for path in (*PROVE, *MEASURE)}


def measures(path: str) -> bool:
    """Whether a file measures. Such a file runs alone on the GPU; other files run side by side."""
    return path.startswith(_MEASUREMENTS)


def run(name: str, options: argparse.Namespace, records: Path) -> None:
    """Runs the files of `RUNS[name]` until the time limit, with the options of the command line.
    The processes append to `records`."""
    deadline = time.monotonic() + LIMIT_S
    files = RUNS[name]
    for file in files:
        append(records, test=file, outcome="not run")
    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as folder:
        model = options.model or Path(folder, MODEL_SHAPE)
        for group in groups(files):
            if time.monotonic() > deadline:
                break
            if not model.exists() and WITH_MODEL & set(map(module_name, group)):
                shape = REHEARSED_MODEL if options.rehearse else ("--shape", MODEL_SHAPE)
                make = [sys.executable, "-m", "tools.make_model", *shape, "--out", str(model)]
                if subprocess.run(make, cwd=ROOT, check=False).returncode:
                    append(records, test="make_model", outcome="failed")
            status = _run_pytest(group, environment(records, group, model, options), deadline)
            if status in (0, 1):  # all passed, or some failed
                for file in group:
                    append(records, test=file, outcome="ended")


def groups(files: Sequence[str]) -> Iterator[list[str]]:
    """Yields files that run together. All files that prove run together. Each measurement has a
    separate process, so that the GPU's memory is free for it."""
    if proving := [file for file in files if not measures(file)]:
        yield proving
    yield from ([file] for file in files if measures(file))


def _run_pytest(files: Sequence[str], env: dict[str, str], deadline: float) -> int:
    """Runs files in pytest's workers; returns pytest's exit status. Kills all processes at the
    deadline or when the user ends this program."""
    with subprocess.Popen(
        command(files), cwd=ROOT, env=env, stdin=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode


def command(files: Sequence[str]) -> list[str]:
    """The command for pytest, with its own configuration and only the plugins named here. If a test
    kills its process, or hangs beyond its limit, another process continues with the other tests."""
    alone = measures(files[0])
    workers = 1 if alone else min(SIDE_BY_SIDE, os.cpu_count() or 1, len(files))
    return [
        *(sys.executable, "-m", "pytest", "-c", str(ROOT / "bench/gpu/pytest.ini")),
        *(f"--rootdir={ROOT}", f"--confcutdir={ROOT}", "--continue-on-collection-errors"),
        *("-p", "xdist.plugin", "-p", "pytest_timeout", "-p", "bench.gpu.plugin"),
        # Workers begin with adjacent tests. "loadfile" would repeat a test that kills its process.
        *("-n", str(workers), "--dist", "worksteal"),
        *("--max-worker-restart", "1000", "--timeout-method", "thread"),
        *("--timeout", str(MEASUREMENT_LIMIT_S if alone else TEST_LIMIT_S)),
        *(str(ROOT / file) for file in files),
    ]


def environment(
    records: Path, files: Sequence[str], model: Path, options: argparse.Namespace
) -> dict[str, str]:
    """The environment of pytest, which can import the checkout but loads no installed plugins."""
    paths = {"model": model, "peer": options.peer}
    given = {
        "records": str(records),
        "paths": {name: str(path.resolve()) for name, path in paths.items() if path},
        "setup": {
            "seed": options.seed,
            "rehearse": options.rehearse,
            "smoke": records.stem == "smoke",
        },
    }
    found = dict(os.environ) | {
        VARIABLE: json.dumps(given),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "TEARDOWN_CUPTI": "0",  # else a process's second profile may be empty
    }
    for name in ("PYTEST_ADDOPTS", "TEST_DEVICE", "TRITON_INTERPRET", *ROUGH_PRODUCTS):
        found.pop(name, None)
    if options.rehearse:
        found["TRITON_INTERPRET"] = "1"
    elif not measures(files[0]):
        found["TEST_DEVICE"] = "cuda"  # for tests that otherwise run on a CPU
    return found
