"""Loading takes the memory of the packed model and of one tensor, no more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.worker_svc.harness import save_model
from tests.worker_svc.quantization.writers import FORMATS, SHAPE, save_quantized

LARGE = {
    "vocab_size": 16384,
    "hidden_size": 512,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "tie_word_embeddings": False,
}
LARGEST = 16384 * 512 * 4
SLACK = 16 << 20  # what malloc keeps of what was freed; all codes of the layers are more
# Else malloc keeps tensors of up to 32 MiB that were freed, in some runs and not in others. With
# 1 MiB, quantizing to int4 still left holes of 1 to 2 MB.
FREED_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": str(1 << 16)}

MEASURE = """
import sys
from pathlib import Path
import torch
from tests.worker_svc.harness import load_rank
from worker_svc.ranks.distributed import TensorParallel
from worker_svc.kernels.cpu import ops
from worker_svc.kernels.ops import PlainWeight

def resident(name):  # in bytes; ru_maxrss would begin at the parent's
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split(name + ":")[1].split()[0])

packed, real_pack = 0, ops.pack

def pack(weight, dtype):
    global packed
    made = real_pack(weight, dtype)
    packed += sum(tensor.nbytes for tensor in made.state().values())
    return made

def load(path, setting):
    return load_rank(path, TensorParallel(), quantization=setting).decoder

ops.pack = pack
torch.set_num_threads(1)
small, large, setting = sys.argv[1:]
load(Path(small), setting)  # the pages of torch's code count too
Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
before, packed = resident("VmRSS"), 0
model = load(Path(large), setting)
if isinstance(model.embed_tokens.weight, PlainWeight):
    packed += model.embed_tokens.weight.weight.nbytes  # was not packed
print(packed, resident("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
@pytest.mark.parametrize(
    "format",
    # Not quantized, while loading, and before.
    ["none", "int4", "W8A8", "GPTQ 4"],
)
def test_peak_of_loading(tmp_path: Path, format: str) -> None:
    for name, shape in (("small", SHAPE), ("large", LARGE)):
        if format in FORMATS:
            save_quantized(tmp_path / name, FORMATS[format], **shape)
        else:
            save_model(tmp_path / name, **shape)
    setting = "auto" if format in FORMATS else format
    arguments = str(tmp_path / "small"), str(tmp_path / "large"), setting

    output = subprocess.run(
        [sys.executable, "-c", MEASURE, *arguments],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | FREED_AT_ONCE,
    ).stdout.splitlines()[-1]

    packed, peak = map(int, output.split())
    print(f"packed {packed}, largest tensor {LARGEST}, peak {peak}")
    assert packed < peak < packed + LARGEST + SLACK
