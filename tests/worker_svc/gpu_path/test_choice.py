"""Which attention backend a GPU gets, and what is said when it cannot get the one asked for."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.worker_svc.gpu_path.flash_attention import FlashAttention3Ops, install_flash_attn
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
) -> tuple[str, int]:
    shape = AttentionShape(1, 4, 2, head_dim, torch.bfloat16, torch.device("cpu"))
    backend = choose_backend(name, shape, block_size, capability, num_sms=4)
    return backend.name, backend.block_size


@pytest.fixture
def flash_attention_3() -> object:
    ops = FlashAttention3Ops()
    yield ops
    ops.close()


@pytest.mark.parametrize("capability", [AMPERE, HOPPER, BLACKWELL])
def test_triton_is_always_there(capability: tuple[int, int]) -> None:
    assert choose("auto", capability) == ("triton", 64)
    assert choose("triton", capability, head_dim=20, block_size=16) == ("triton", 16)


@pytest.mark.usefixtures("flash_attention_3")
def test_auto_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    install_flash_attn(monkeypatch)
    assert choose("auto") == ("fa3", 64)
    assert choose("auto", block_size=16) == ("fa3", 16)
    assert choose("auto", head_dim=20) == ("triton", 64)


@pytest.mark.usefixtures("flash_attention_3")
@pytest.mark.parametrize("capability", [AMPERE, BLACKWELL])
def test_auto_elsewhere(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    assert choose("auto", capability) == ("triton", 64)
    install_flash_attn(monkeypatch)
    assert choose("auto", capability) == ("flash_attn+triton", 256)
    assert choose("auto", capability, block_size=512) == ("flash_attn+triton", 512)
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
    with pytest.raises(StartError, match="block_size 64 is no multiple of 256"):
        choose("flash_attn", block_size=64)
    with pytest.raises(StartError, match="head_dim 20 is no multiple of 8"):
        choose("fa3", head_dim=20)
