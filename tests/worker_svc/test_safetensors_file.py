"""Files that are damaged, or made to have their reader look where it should not."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file

from worker_svc.errors import ModelError
from worker_svc.weights.files import WeightReader
from worker_svc.weights.safetensors_file import DTYPES, Runs, read_tensors

CPU = torch.device("cpu")
A_BYTES, B_BYTES = 24, 8  # of the tensors in `header`


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.safetensors"


def contents(header: object, data: bytes = bytes(A_BYTES + B_BYTES)) -> bytes:
    """The bytes of a file with this header, which need not be a valid header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def header(**changes: Any) -> dict[str, Any]:
    a = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    b = {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]}
    return {"__metadata__": {"format": "pt"}, "a": a, "b": b | changes}


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    written = {name: torch.ones(2, 3).to(dtype) for name, dtype in DTYPES.items()}
    written |= {"scalar": torch.tensor(7), "empty": torch.empty(0, 3), "deep": torch.rand(2, 3, 4)}
    save_file(written, tmp_path / "x.safetensors")
    with WeightReader(tmp_path, torch.float32, CPU) as reader:
        for name, tensor in written.items():
            read = reader.read(name)
            assert read.dtype == tensor.dtype
            assert read.shape == tensor.shape
            assert read.view(-1).view(torch.uint8).equal(tensor.view(-1).view(torch.uint8)), name
        reader.check_all_read()


WHOLE = contents(header())


def test_header_made_here_is_read(path: Path) -> None:
    """So that the others are rejected for what they change."""
    path.write_bytes(WHOLE)
    assert read_tensors(path)["b"].shape == (4,)


LIES: list[tuple[dict[str, Any], str]] = [
    ({"dtype": "F4"}, "b: dtype F4 is not one of BOOL"),
    ({"dtype": ["F32"]}, r"b: dtype \['F32'\] is not one of"),
    ({"shape": [5]}, r"b: BF16 of shape \[5\] does not take the bytes 24 to 32"),
    ({"shape": [-2, -2]}, r"b: shape \[-2, -2\] .* have to be natural"),
    ({"shape": [4.0]}, "b: shape .* have to be natural"),
    ({"shape": [True, 4]}, "b: shape .* have to be natural"),
    ({"shape": 4}, "b: dtype, shape and data_offsets are needed"),
    ({"shape": [1 << 62, 4]}, "b: BF16 of shape .* does not take"),
    ({"data_offsets": [24]}, "b: dtype, shape and data_offsets are needed"),
    ({"data_offsets": [-8, 0]}, "b: .* -8 to 0 have to be natural"),
    ({"data_offsets": [32, 24]}, "b: .* does not take the bytes 32 to 24"),
    ({"data_offsets": [32, 40]}, r"cut short: b ends at byte \d+ of \d+"),
    ({"data_offsets": [1 << 62, (1 << 62) + 8]}, "cut short: b ends"),
    ({"data_offsets": [16, 24]}, "b begins at byte .*, the data before it ends at"),
    ({"data_offsets": [0, 8]}, "a begins at byte .*, the data before it ends at"),
    ({"shape": [3], "data_offsets": [26, 32]}, "b begins at byte"),
    ({"shape": [3], "data_offsets": [24, 30]}, "2 bytes belong to no tensor"),
]
NO_ENTRY = "a: dtype, shape and data_offsets are needed"
NO_FILE = "not a safetensors file"
DEEP, LONG_NUMBER = b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}"
REJECTED = [
    *((contents(header(**changes)), message) for changes, message in LIES),
    *((contents({"a": entry}), NO_ENTRY) for entry in (None, 3, [], {})),
    *((contents(text), NO_FILE) for text in (b"", b"[]", b"{", b"\xff", DEEP, LONG_NUMBER)),
    # A header longer than the file.
    *((struct.pack("<Q", n) + WHOLE[8:], NO_FILE) for n in (1 << 62, (1 << 64) - 1, 1000)),
    *((WHOLE[:-cut], "cut short: ") for cut in (1, B_BYTES + 1)),
    *((WHOLE[:length], NO_FILE) for length in (20, 7, 0)),
]


@pytest.mark.parametrize(("content", "message"), REJECTED, ids=[each[1] for each in REJECTED])
def test_a_broken_file_is_rejected(path: Path, content: bytes, message: str) -> None:
    path.write_bytes(content)
    with pytest.raises(ModelError, match=rf"^x\.safetensors: {message}"):
        WeightReader(path.parent, torch.float32, CPU)


def test_file_cut_short_while_it_is_read(path: Path) -> None:
    """With a mapping this would be a SIGBUS."""
    path.write_bytes(WHOLE)
    with WeightReader(path.parent, torch.float32, CPU) as reader:
        os.truncate(path, path.stat().st_size - B_BYTES - 4)
        with pytest.raises(ModelError, match=r"x\.safetensors: cut short: a is not all there"):
            reader.read_into(torch.empty(2, 3), "a")
        reader.read("a", range(1), range(3))
        path.unlink()
        with pytest.raises(ModelError, match=r"x\.safetensors: cannot read b: .*No such file"):
            reader.read("b")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_slices_are_those_of_the_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Also where a piece that is converted ends within a row."""
    monkeypatch.setattr("worker_svc.weights.files._BUFFER_BYTES", 32)
    whole = torch.rand(11, 13)
    save_file({"x": whole}, tmp_path / "x.safetensors")
    with WeightReader(tmp_path, dtype, CPU) as reader:
        for rows, columns in [(0, 0), (1, 1), (11, 13), (4, 7)]:
            for at in (0, 11 - rows):
                out = torch.empty(rows, 13, dtype=dtype)
                reader.read_into(out, "x", start=at)
                assert torch.equal(out, whole[at : at + rows].to(dtype))
            for at in (0, 13 - columns):
                out = torch.empty(11, columns, dtype=dtype)
                reader.read_into(out, "x", dim=1, start=at)
                assert torch.equal(out, whole[:, at : at + columns].to(dtype))
        part = reader.read("x", range(2, 9), range(5, 6))
        assert torch.equal(part, whole[2:9, 5:6])


@pytest.mark.parametrize(("available", "dropped"), [(40, [(100, 1_999_950)]), (60, [])])
def test_what_was_read_leaves_the_page_cache_if_memory_is_short(
    path: Path,
    available: int,
    dropped: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory, calls = SimpleNamespace(available=available, total=100), []
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(os, "posix_fadvise", lambda file, *rest: calls.append(rest))
    path.write_bytes(bytes(3_000_000))
    with path.open("rb") as file:
        for size in (0, 100, 1_000_000):  # of runs of 50 bytes, each after 50 others
            assert Runs(100, 50, 100).read(file.fileno(), 0, memoryview(bytearray(size)))
    assert calls == [(*each, os.POSIX_FADV_DONTNEED) for each in dropped]
