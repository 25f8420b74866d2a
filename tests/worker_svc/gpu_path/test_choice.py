"""The attention backend that a GPU gets, and the message when it cannot get the one asked for."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from typing import Literal

import pytest
import structlog
import torch

from tests.worker_svc.gpu_path import flash_attention
from tests.worker_svc.gpu_path.flash_attention import (
    FlashAttention3Ops,
    attend,
    install_flash_attn,
)
from worker_svc.attention.base import AttentionShape
from worker_svc.attention.choice import choose_backend
from worker_svc.errors import StartError

AMPERE, HOPPER, BLACKWELL = (8, 0), (9, 0), (10, 0)


def choose(
    name: str,
    capability: tuple[int, int] = HOPPER,
    *,
    head_dim: int = 128,
    block_size: int | None = None,
    kv_dtype: Literal["auto", "int8", "fp8"] = "auto",
) -> tuple[str, int]:
    shape = AttentionShape(1, 4, 2, head_dim, torch.bfloat16, torch.device("cpu"), kv_dtype)
    backend = choose_backend(name, shape, block_size, capability, num_sms=4)
    return backend.name, backend.block_size


@pytest.fixture
def flash_attention_3() -> Iterator[FlashAttention3Ops]:
    ops = FlashAttention3Ops()
    yield ops
    ops.close()


def without_paging(q: torch.Tensor, *_: object) -> torch.Tensor:
    raise RuntimeError("This flash attention build does not support paged KV.\nat line 1")


def of_wrong_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    lens: torch.Tensor,
    table: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    return attend(q, k, v, starts, lens, table.flip(0), scale)


def writing_nothing(q: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.full_like(q, torch.nan)


@pytest.mark.parametrize("capability", [AMPERE, HOPPER, BLACKWELL])
def test_triton_is_always_there(capability: tuple[int, int]) -> None:
    assert choose("auto", capability) == ("triton", 64)
    assert choose("triton", capability, head_dim=20, block_size=16) == ("triton", 16)


@pytest.mark.usefixtures("flash_attention_3")
def test_auto_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    install_flash_attn(monkeypatch)
    assert choose("auto") == choose("fa3") == ("fa3", 128)
    assert choose("auto", block_size=16) == ("fa3", 16)
    assert choose("auto", head_dim=20) == ("triton", 64)
    assert choose("flash_attn") == ("flash_attn", 256)


@pytest.mark.usefixtures("flash_attention_3")
@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (without_paging, r"does not support paged KV\.$"),
        (of_wrong_blocks, "its result is off by"),
        (writing_nothing, "its result is off by nan"),
    ],
)
def test_a_build_that_cannot_do_it_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, broken: Callable[..., torch.Tensor], reason: str
) -> None:
    """Being installed is not enough. Auto falls back, and says why."""
    monkeypatch.setattr(flash_attention, "attend", broken)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with structlog.testing.capture_logs() as logs:
        assert choose("auto") == ("triton", 64)
    assert [entry["name"] for entry in logs] == ["fa3"]
    assert re.search(reason, logs[0]["reason"])
    with pytest.raises(StartError, match=f"attention: fa3 cannot be used: .*{reason}"):
        choose("fa3")


@pytest.mark.usefixtures("flash_attention_3")
def test_a_device_lost_while_trying_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else could be tried in this process."""

    def lost(*_: object) -> torch.Tensor:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(flash_attention, "attend", lost)
    with pytest.raises(torch.AcceleratorError):
        choose("auto")


@pytest.mark.usefixtures("flash_attention_3")
@pytest.mark.parametrize("capability", [AMPERE, BLACKWELL])
def test_auto_elsewhere(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    assert choose("auto", capability) == ("triton", 64)
    install_flash_attn(monkeypatch)
    assert choose("auto", capability) == ("flash_attn", 256)
    assert choose("auto", capability, block_size=512) == ("flash_attn", 512)
    assert choose("auto", capability, block_size=16) == ("triton", 16)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, module, None)  # importing it fails
    with pytest.raises(StartError, match=r"attention: fa3 .* install FlashAttention 3"):
        choose("fa3")
    with pytest.raises(StartError, match=r"attention: flash_attn .* pip install flash-attn"):
        choose("flash_attn")


@pytest.mark.usefixtures("flash_attention_3")
def test_what_a_backend_cannot_serve_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install_flash_attn(monkeypatch)
    with pytest.raises(StartError, match=r"Hopper GPUs, this one has capability 8\.0"):
        choose("fa3", AMPERE)
    with pytest.raises(StartError, match="block_size 64 is not a multiple of 256"):
        choose("flash_attn", block_size=64)
    with pytest.raises(StartError, match="fa3 cannot be used: head_dim 20 is not a multiple of 8"):
        choose("fa3", head_dim=20)
    for head_dim in (8, 264):
        message = f"triton cannot be used: head_dim {head_dim} is not in 9..256"
        with pytest.raises(StartError, match=message):
            choose("auto", head_dim=head_dim)


@pytest.mark.usefixtures("flash_attention_3")
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_only_triton_has_caches_in_8_bits(
    monkeypatch: pytest.MonkeyPatch, kv_dtype: Literal["int8", "fp8"]
) -> None:
    install_flash_attn(monkeypatch)
    assert choose("auto", kv_dtype=kv_dtype) == ("triton", 64)
    for name in ("fa3", "flash_attn"):
        message = rf"{name} cannot be used: kv_dtype: .* has no {kv_dtype} cache"
        with pytest.raises(StartError, match=message):
            choose(name, kv_dtype=kv_dtype)


def test_scales_have_to_be_aligned() -> None:
    with pytest.raises(StartError, match="kv_dtype: head_dim 18 is not a multiple of 4"):
        choose("auto", head_dim=18, kv_dtype="int8")
    assert choose("auto", head_dim=18, kv_dtype="fp8") == ("triton", 64)
