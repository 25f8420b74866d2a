"""Stand-ins for FlashAttention 2 and 3: their signatures, the results of a plain reference, and
complaints about arguments that the kernels would not take."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.library import Library

from worker_svc.kernels.triton.paged_attention import attention_reference

# As torch.ops.flash_attn_3 has them (flash-attn 3.0.0b1, the build in xformers 0.0.34).
FWD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new = None, Tensor(v_new!)? v_new = None, "
    "Tensor? q_v = None, Tensor(out!)? out = None, Tensor? cu_seqlens_q = None, "
    "Tensor? cu_seqlens_k = None, Tensor? cu_seqlens_k_new = None, Tensor? seqused_q = None, "
    "Tensor? seqused_k = None, int? max_seqlen_q = None, int? max_seqlen_k = None, "
    "Tensor? page_table = None, Tensor? kv_batch_idx = None, Tensor? leftpad_k = None, "
    "Tensor? rotary_cos = None, Tensor? rotary_sin = None, Tensor? seqlens_rotary = None, "
    "Tensor? q_descale = None, Tensor? k_descale = None, Tensor? v_descale = None, "
    "float? softmax_scale = None, bool is_causal = False, int window_size_left = -1, "
    "int window_size_right = -1, int attention_chunk = 0, float softcap = 0.0, "
    "bool is_rotary_interleaved = False, Tensor? scheduler_metadata = None, int num_splits = 0, "
    "bool? pack_gqa = None, int sm_margin = 0) -> (Tensor(out!), Tensor, Tensor, Tensor)"
)
SCHEDULE = (
    "get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, "
    "int num_heads_k, int headdim, int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, "
    "Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, Tensor? cu_seqlens_k_new = None, "
    "Tensor? seqused_q = None, Tensor? leftpad_k = None, int? page_size = None, "
    "int max_seqlen_k_new = 0, bool is_causal = False, int window_size_left = -1, "
    "int window_size_right = -1, int attention_chunk = 0, bool has_softcap = False, "
    "int num_splits = 0, bool? pack_gqa = None, int sm_margin = 0) -> Tensor"
)


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    table: torch.Tensor,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """q [T, heads, head_dim], keys and values [blocks, block_size, kv_heads, head_dim], table
    [S, blocks] -> [T, heads, head_dim]; sequences without context give zeros. What is before the
    first query is not computed."""
    offsets = torch.arange(len(table) + 1) * table.shape[1]
    lens = query_starts.diff(), context_lens
    cache, first = torch.stack((keys, values)), int(query_starts[0])
    out = torch.full_like(q, torch.nan)
    out[first:] = attention_reference(
        q[first:], cache, *lens, table.flatten(), offsets, scale, window
    )
    return out


_SAME = ("max_seqlen_q", "max_seqlen_k", "num_splits", "window_size_left")


class FlashAttention3Ops:
    """Registers `torch.ops.flash_attn_3` while it lives."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._library = Library("flash_attn_3", "DEF")
        self._library.define(SCHEDULE)
        self._library.define(FWD)
        self._library.impl("get_scheduler_metadata", self._schedule, "CPU")
        self._library.impl("fwd", self._forward, "CPU")

    def close(self) -> None:
        self._library._destroy()
        for name in ("fwd", "get_scheduler_metadata"):
            if name in torch.ops.flash_attn_3.__dict__:
                delattr(torch.ops.flash_attn_3, name)

    def _schedule(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = by_name(SCHEDULE, args, kwargs)
        assert given["seqused_k"].dtype == torch.int32
        assert given["batch_size"] == len(given["seqused_k"])
        assert given["is_causal"]
        self.calls.append("schedule")
        assert given["num_splits"] > 0  # 0: it chooses, and `fwd` may choose differently
        # Depends on the arguments, so that `fwd` can tell whether its own are the same.
        same = [given[name] for name in _SAME]
        return torch.cat((torch.tensor(same, dtype=torch.int32), given["seqused_k"]))

    def _forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        given = by_name(FWD, args, kwargs)
        self.calls.append("fwd")
        q, k, v = given["q"], given["k"], given["v"]
        table, lens, starts = given["page_table"], given["seqused_k"], given["cu_seqlens_q"]
        for tensor in (table, lens, starts):
            assert tensor.dtype == torch.int32
            assert tensor.stride(-1) == 1
        assert given["is_causal"]
        max_q = given["max_seqlen_q"]
        assert int(starts.diff().max()) <= max_q
        # Without `cu_seqlens_k`, the kernel does not look at `max_seqlen_k`.
        max_k = table.shape[1] * k.shape[1]
        assert int(lens.max()) <= max_k
        schedule = given["scheduler_metadata"].tolist()
        given["max_seqlen_k"] = max_k
        assert schedule == [*(given[name] for name in _SAME), *lens.tolist()]
        window = given["window_size_left"] + 1 or None
        out = attend(q, k, v, starts, lens, table, given["softmax_scale"], window)
        return out, out.new_empty(0), out.new_empty(0), out.new_empty(0)


def by_name(schema: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    arguments = torch._C.parse_schema(f"flash_attn_3::{schema}").arguments
    defaults = {argument.name: argument.default_value for argument in arguments}
    return defaults | dict(zip(defaults, args, strict=False)) | kwargs


def install_flash_attn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Installs a module `flash_attn` -> the name of its function, each time that it is called."""
    calls: list[str] = []

    def flash_attn_varlen_func(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        *,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        block_table: torch.Tensor,
    ) -> torch.Tensor:
        calls.append("flash_attn_varlen_func")
        assert k.shape[1] % 256 == 0
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == block_table.dtype == torch.int32
        assert causal
        lens = cu_seqlens_k.diff()
        assert int(cu_seqlens_k[0]) == 0
        assert int(lens.max()) <= max_seqlen_k
        assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q
        window = window_size[0] + 1 or None
        assert window_size[1] == (-1 if window is None else 0)
        return attend(q, k, v, cu_seqlens_q, lens, block_table, softmax_scale, window)

    module = ModuleType("flash_attn")
    module.__dict__.update(flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    return calls
