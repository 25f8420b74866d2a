from __future__ import annotations

from pathlib import Path

import pytest
import torch

from worker_svc.kernels.cpu import huge_pages
from worker_svc.kernels.cpu.weights import pack_floats

OFFERED = Path("/sys/kernel/mm/transparent_hugepage")


def flags(tensor: torch.Tensor) -> list[str]:
    """The flags of the mapping that holds the tensor, as proc_pid_smaps(5) names them."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            begin, end = (int(each, 16) for each in name.split("-"))
            inside = begin <= tensor.data_ptr() < end
        elif inside and name == "VmFlags:":
            return values
    raise ValueError("no mapping")


@pytest.mark.skipif(not OFFERED.exists(), reason="this kernel has no huge pages")
def test_weights_are_in_huge_pages() -> None:
    weight = pack_floats(torch.randn(64, 48))
    assert "hg" in flags(weight.state()["codes"])


def test_copies_are_equal_and_apart() -> None:
    given = [torch.randn(3, 5), torch.arange(7, dtype=torch.int8), torch.empty(0, 2)]
    given += [torch.randn(4096, 4096).bfloat16(), torch.randn(99)]  # more than a chunk holds
    copies = [huge_pages.copy(each) for each in given]
    for each in copies:
        assert each.data_ptr() % 64 == 0
    for each, copied in zip(given, copies, strict=True):
        assert copied.dtype == each.dtype
        assert torch.equal(copied, each)
    for number, copied in enumerate(copies):
        copied.fill_(number)
    for number, copied in enumerate(copies):
        assert (copied == number).all()
