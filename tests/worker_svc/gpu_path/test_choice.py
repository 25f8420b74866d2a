"""The attention backend that a GPU gets, and the message when it cannot get the one asked for."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any, Literal

import pytest
import structlog
import torch

from tests.worker_svc.gpu_path import flash_attention
from tests.worker_svc.gpu_path.flash_attention import attend
from worker_svc.attention.base import AttentionShape
from worker_svc.attention.choice import choose_backend
from worker_svc.errors import StartError

ALL = AMPERE, HOPPER, BLACKWELL = [(8, 0), (9, 0), (10, 0)]


def choose(
    name: str,
    capability: tuple[int, int] = HOPPER,
    *,
    head_dim: int = 128,
    block_size: int | None = None,
    kv_dtype: Literal["auto", "int8", "fp8"] = "auto",
    window: int | None = None,
) -> tuple[str, int]:
    shape = AttentionShape(
        (None, window),
        4,
        2,
        head_dim,
        torch.bfloat16,
        torch.device("cpu"),
        kv_dtype,
    )
    backend = choose_backend(name, shape, block_size, capability, num_sms=4)
    return backend.name, backend.block_size


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
    window: int | None,
) -> torch.Tensor:
    return attend(q, k, v, starts, lens, table.flip(0), scale, window)


def without_windows(q: torch.Tensor, *rest: Any) -> torch.Tensor:
    return attend(q, *rest[:-1])


def writing_nothing(q: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.full_like(q, torch.nan)


@pytest.mark.parametrize("capability", [AMPERE, HOPPER, BLACKWELL])
def test_triton_is_always_there(capability: tuple[int, int]) -> None:
    assert choose("auto", capability) == ("triton", 64)
    assert choose("triton", capability, head_dim=20, block_size=16) == ("triton", 16)


@pytest.mark.usefixtures("flash_attention_3", "flash_attention_2")
@pytest.mark.parametrize(
    ("name", "capabilities", "options", "chosen"),
    [
        ("auto", [HOPPER], {}, ("fa3", 128)),
        ("fa3", [HOPPER], {}, ("fa3", 128)),
        ("auto", [HOPPER], {"block_size": 16}, ("fa3", 16)),
        ("auto", [AMPERE, BLACKWELL], {}, ("flash_attn", 256)),
        ("auto", [AMPERE, BLACKWELL], {"block_size": 512}, ("flash_attn", 512)),
        ("auto", [AMPERE, BLACKWELL], {"block_size": 16}, ("triton", 16)),
        ("flash_attn", ALL, {}, ("flash_attn", 256)),
        ("auto", ALL, {"head_dim": 20}, ("triton", 64)),
        ("auto", ALL, {"kv_dtype": "int8"}, ("triton", 64)),
        ("auto", ALL, {"kv_dtype": "fp8", "head_dim": 20}, ("triton", 64)),
    ],
)
def test_with_both_libraries(
    name: str,
    capabilities: list[tuple[int, int]],
    options: dict[str, Any],
    chosen: tuple[str, int],
) -> None:
    for capability in capabilities:
        assert choose(name, capability, **options) == chosen


@pytest.mark.usefixtures("flash_attention_3")
@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (without_paging, r"does not support paged KV\.$"),
        (of_wrong_blocks, "its result is off by"),
        (writing_nothing, "its result is off by nan"),
    ],
)
def test_a_library_with_wrong_results_is_not_chosen(
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
def test_a_library_without_windows_serves_models_without(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose("auto", window=512) == ("fa3", 128)
    monkeypatch.setattr(flash_attention, "attend", without_windows)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert choose("auto", window=512) == ("triton", 64)
    assert choose("auto") == ("fa3", 128)


@pytest.mark.usefixtures("flash_attention_3")
def test_a_device_lost_while_trying_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else could be tried in this process."""

    def lost(*_: object) -> torch.Tensor:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(flash_attention, "attend", lost)
    with pytest.raises(torch.AcceleratorError):
        choose("auto")


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, module, None)  # importing it fails
    with pytest.raises(StartError, match=r"attention: fa3 .* install FlashAttention 3"):
        choose("fa3")
    with pytest.raises(StartError, match=r"attention: flash_attn .* pip install flash-attn"):
        choose("flash_attn")


@pytest.mark.usefixtures("flash_attention_3", "flash_attention_2")
@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("fa3", {"capability": AMPERE}, r"Hopper GPUs, this one has capability 8\.0"),
        ("flash_attn", {"block_size": 64}, "block_size 64 is not a multiple of 256"),
        ("fa3", {"head_dim": 20}, "head_dim 20 is not a multiple of 8"),
        ("auto", {"head_dim": 8}, "head_dim 8 is not in 9..256"),
        ("auto", {"head_dim": 264}, "head_dim 264 is not in 9..256"),
        ("fa3", {"kv_dtype": "int8"}, "kv_dtype: fa3 has no int8 cache"),
        ("flash_attn", {"kv_dtype": "fp8"}, "kv_dtype: flash_attn has no fp8 cache"),
        ("auto", {"kv_dtype": "int8", "head_dim": 18}, "head_dim 18 is not a multiple of 4"),
        ("auto", {"kv_dtype": "fp8", "head_dim": 18}, "head_dim 18 is not a multiple of 4"),
    ],
)
def test_the_reason_why_a_backend_cannot_serve_is_named(
    name: str, options: dict[str, Any], reason: str
) -> None:
    last = "triton" if name == "auto" else name
    with pytest.raises(StartError, match=f"attention: {last} cannot be used: .*{reason}"):
        choose(name, **options)
