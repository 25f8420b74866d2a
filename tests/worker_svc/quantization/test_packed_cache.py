"""Weights that were packed by an earlier start."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from tests.damage import damages
from tests.worker_svc.harness import save_model, worker_settings
from tests.worker_svc.quantization import writers
from tests.worker_svc.quantization.writers import FORMATS, SHAPE, save_quantized
from tests.worker_svc.untrusted import untrusted
from worker_svc import loader
from worker_svc.kernels.cpu import ops as cpu_ops
from worker_svc.model_runner import ModelRunner
from worker_svc.weights.packed_cache import PackedCache
from worker_svc.weights.quantization.quantize import quantize

READ, KEPT, NOT_KEPT, BROKEN, REJECTED = (
    f"packed weights are {how}"
    for how in (
        "read",
        "kept",
        "not kept; the next start packs again",
        "broken; packing again",
        "rejected; packing again",
    )
)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    save_model(tmp_path, **SHAPE)
    return tmp_path


def start(model_dir: Path, quantization: str = "int8", **settings: Any) -> tuple[Any, list[str]]:
    """Loads a model -> its matrices by name, and what was said about the cache."""
    with capture_logs() as logs:
        model = ModelRunner(
            worker_settings(model_dir, quantization=quantization, **settings)
        )._model.decoder
    matrices = {"embedding": model.embed_tokens.weight}
    for i, layer in enumerate(model.layers):
        for part, names in (
            (layer.attention, ("qkv_proj", "o_proj")),
            (layer.mlp, ("gate_up_proj", "down_proj")),
        ):
            matrices |= {f"{i} {name}": getattr(part, name)._weight for name in names}
    return matrices, [each["event"] for each in logs if "packed" in each["event"]]


def same(a: Any, b: Any) -> bool:
    return all(
        torch.equal(tensor.view(torch.uint8), b[name].state()[part].view(torch.uint8))
        for name in a
        for part, tensor in a[name].state().items()
    )


def files(cache_home: Path) -> list[Path]:
    packed = cache_home / "nano-vllm-grpc" / "packed"
    return sorted(each for each in packed.rglob("*") if each.is_file())


@pytest.mark.parametrize("format", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("settings", [{}, {"tp": 2, "rank": 1}], ids=["alone", "rank"])
def test_a_second_start_reads(
    model_dir: Path,
    cache_home: Path,
    format: str,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, said = start(model_dir, format, **settings)
    assert said == [KEPT]
    (path,) = files(cache_home)
    assert path.relative_to(cache_home).parts[:2] == ("nano-vllm-grpc", "packed")
    monkeypatch.setattr(cpu_ops, "quantize", None)  # it would not be called
    second, said = start(model_dir, format, **settings)
    assert said == [READ]
    assert same(first, second)
    assert files(cache_home) == [path]


@pytest.mark.parametrize("format", FORMATS.values(), ids=list(FORMATS))
def test_a_second_start_reads_what_a_checkpoint_holds_quantized(
    tmp_path: Path, format: writers.Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it neither unpacks nor packs."""
    save_quantized(tmp_path, format)
    first, said = start(tmp_path, "auto")
    assert said == [KEPT]
    monkeypatch.setattr(loader, "join_rows", None)
    second, said = start(tmp_path, "auto")
    assert said == [READ]
    assert same(first, second)


def test_weights_that_are_not_quantized_are_not_kept(model_dir: Path, cache_home: Path) -> None:
    ModelRunner(worker_settings(model_dir))
    assert files(cache_home) == []


def test_settings_have_files_of_their_own(
    model_dir: Path, cache_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(model_dir, "int8")
    assert start(model_dir, "int4")[1] == [KEPT]
    assert start(model_dir, "int8", dtype="bfloat16")[1] == [KEPT]
    monkeypatch.setattr(cpu_ops, "layout", "of another CPU")
    assert start(model_dir, "int4")[1] == [KEPT]
    assert len(files(cache_home)) == 4
    zero, said = start(model_dir, "int8", rank=0, tp=2)
    one, also_said = start(model_dir, "int8", rank=1, tp=2)
    assert said == also_said == [KEPT]
    assert not same(zero, one)
    assert len(files(cache_home)) == 6


def test_changed_weights_are_quantized_again(model_dir: Path, cache_home: Path) -> None:
    """Even if names, sizes and times are the same, as after copying with `cp -p`."""
    path = model_dir / "model.safetensors"
    first, _ = start(model_dir)
    status = path.stat()
    tensors = {name: 2 * tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})
    assert path.stat().st_size == status.st_size
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    second, said = start(model_dir)
    assert said == [KEPT]
    assert not same(first, second)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert start(model_dir)[1] == [READ]


def test_a_file_without_a_weight_is_replaced(model_dir: Path, cache_home: Path) -> None:
    start(model_dir)
    (path,) = files(cache_home)
    names, right = header(path), path.read_bytes()
    name = b"model.layers.1.mlp.down_proj "
    path.write_bytes(right.replace(name, name.upper()))
    assert start(model_dir)[1] == [KEPT]
    assert set(header(path)) == set(names)


def check_replaced(
    model_dir: Path, cache_home: Path, change: Callable[[Path], None], reasons: set[str]
) -> None:
    """Checks that a file so changed is rejected for one of these reasons, and made again."""
    first, _ = start(model_dir)
    (path,) = files(cache_home)
    change(path)
    second, said = start(model_dir)
    assert said[0] in reasons
    assert said[1:] == [KEPT]
    third, said = start(model_dir)
    assert said == [READ]
    assert same(first, second)
    assert same(first, third)


@damages
def test_a_damaged_file_is_replaced(
    model_dir: Path, cache_home: Path, damage: Callable[[Path], None]
) -> None:
    check_replaced(model_dir, cache_home, damage, {BROKEN, REJECTED})


@pytest.mark.parametrize("place", [0.02, 0.5, 0.98])
@pytest.mark.parametrize("lost", [1, 4096])
def test_a_file_whose_bytes_have_changed_is_replaced(
    model_dir: Path, cache_home: Path, place: float, lost: int
) -> None:
    """A loss of power or a bad disk may leave it so, with all of its size."""

    def change(path: Path) -> None:
        data = bytearray(path.read_bytes())
        header_size = 8 + int.from_bytes(data[:8], "little")
        at = header_size + int(place * (len(data) - header_size - lost))
        data[at : at + lost] = bytes(each ^ 0xFF for each in data[at : at + lost])
        path.write_bytes(data)

    check_replaced(model_dir, cache_home, change, {REJECTED})


@untrusted
def test_a_file_that_others_may_have_written_is_replaced(
    model_dir: Path, cache_home: Path, change: Callable[[Path], None]
) -> None:
    check_replaced(model_dir, cache_home, change, {REJECTED})
    status = files(cache_home)[0].lstat()
    assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (os.geteuid(), 0o600)


@untrusted
def test_a_folder_that_others_may_have_written_is_not_used(
    model_dir: Path, cache_home: Path, change: Callable[[Path], None]
) -> None:
    first, _ = start(model_dir)
    change(files(cache_home)[0].parent)
    second, said = start(model_dir)
    assert said == [REJECTED, NOT_KEPT]
    assert same(first, second)


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("codes", lambda tensor: tensor[..., :-1].contiguous()),
        ("scales", lambda tensor: tensor.to(torch.float64)),
        ("zeros", lambda tensor: tensor.unsqueeze(0)),
        ("zeros", lambda tensor: None),
        ("shape", lambda tensor: 100 * tensor),  # loops count by its numbers
    ],
    ids=["short", "dtype", "dimensions", "missing", "numbers"],
)
def test_tensors_that_are_not_as_packed_are_rejected(
    tmp_path: Path, part: str, change: Callable[[torch.Tensor], torch.Tensor | None]
) -> None:
    state = cpu_ops.pack(quantize(torch.randn(40, 64), "int4"), torch.float32).state()
    cache = PackedCache(tmp_path, "x", ())
    cache.add("weight", state)
    cache.save()
    (path,) = tmp_path.iterdir()
    tensors = load_file(path)
    save_file(tensors, path)
    found = PackedCache(tmp_path, "x", ()).get("weight", new)
    assert found is not None
    assert found.keys() == state.keys()
    (name,) = (name for name in tensors if name.endswith(f":{part}"))
    changed = tensors | {name: change(tensors[name])}
    save_file({key: tensor for key, tensor in changed.items() if tensor is not None}, path)
    with capture_logs() as logs:
        assert PackedCache(tmp_path, "x", ()).get("weight", new) is None
    assert [each["event"] for each in logs] == [REJECTED]
    assert not path.exists()


def test_a_file_that_another_process_has_replaced_stays(tmp_path: Path) -> None:
    for names in ("ab", "ba"):
        opened = PackedCache(tmp_path, "x", ())
        cache = PackedCache(tmp_path, "x", ())
        for name in names:
            cache.add(name, {"weight": torch.full([3], ord(name))})
        cache.save()
    assert opened.get("a", new) is None
    found = PackedCache(tmp_path, "x", ()).get("a", new)
    assert found
    assert found["weight"].tolist() == [ord("a")] * 3


def header(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        names: list[str] = file.keys()
    return names


def test_directory_that_cannot_be_made(model_dir: Path, cache_home: Path) -> None:
    (cache_home / "nano-vllm-grpc").write_text("a file")
    assert start(model_dir)[1][-1] == NOT_KEPT


def test_full_disk(model_dir: Path, cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves nothing behind."""

    def no_space(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    assert start(model_dir)[1] == [NOT_KEPT]
    assert files(cache_home) == []


@pytest.mark.usefixtures("no_home")
def test_without_a_home_nothing_is_kept(model_dir: Path) -> None:
    assert start(model_dir)[1] == [NOT_KEPT]


STATE = {"weight": torch.zeros(3)}


def new(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def keep(directory: Path, variant: str, key: str) -> None:
    cache = PackedCache(directory, variant, (key,))
    cache.get("x", new)
    cache.add("x", STATE)
    cache.save()


def test_old_files_are_removed(tmp_path: Path) -> None:
    """The two used last of each format and rank stay."""
    times = iter(range(1, 100))

    def keep_at_next_second(variant: str, key: str) -> None:
        keep(tmp_path, variant, key)
        for path in tmp_path.glob("*"):  # what was just touched is the newest
            if path.stat().st_mtime > 1000:
                os.utime(path, (second := next(times), second))

    keep_at_next_second("int8-0-of-1", "a")
    keep_at_next_second("int8-0-of-1", "b")
    keep_at_next_second("int4-0-of-1", "a")
    keep_at_next_second("int8-0-of-1", "a")  # read
    keep_at_next_second("int8-0-of-1", "c")
    variants = sorted(path.name[:11] for path in tmp_path.iterdir())
    assert variants == ["int4-0-of-1", "int8-0-of-1", "int8-0-of-1"]
    assert PackedCache(tmp_path, "int8-0-of-1", ("a",)).get("x", new) is not None
    assert PackedCache(tmp_path, "int8-0-of-1", ("b",)).get("x", new) is None


def test_files_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    (tmp_path / "old.tmp").write_bytes(b"x")
    os.utime(tmp_path / "old.tmp", (1, 1))
    (tmp_path / "new.tmp").write_bytes(b"x")  # maybe of a writer at work
    keep(tmp_path, "int8-0-of-1", "a")
    assert [path.name for path in tmp_path.glob("*.tmp")] == ["new.tmp"]
