"""Names all that the bytes of a cached block depend on, except its tokens."""

from __future__ import annotations

from pathlib import Path

import torch

from worker_svc.rank_models.info import RunnerInfo
from worker_svc.rank_models.rank_model import RankModel
from worker_svc.settings import WorkerSettings
from worker_svc.user_cache import digest_of_sources

# Sources on which keys and values, or their order in a file, depend.
_SOURCES = """
    attention devices gguf kernels kv_cache.py layers loader.py models rank_models ranks step tier
    weights
"""


def block_key(settings: WorkerSettings, model: RankModel, info: RunnerInfo, layout: str) -> str:
    """The key of the blocks of a rank. `layout` is that of `Ops`, which names a CPU's kernels."""
    rope = model.config.rope
    return repr(
        (
            info.fingerprint,
            info.dtype,
            rope,
            rope.is_long(info.max_model_len),
            settings.kv_dtype,
            (settings.speculation, settings.draft_quantization) if settings.draft_model else None,
            info.attention_backend,
            info.paging,
            settings.batch_invariant,
            (settings.rank, settings.tp, model.stage),
            layout,
            torch.cuda.get_device_name(info.device) if "cuda" in info.device else info.device,
            torch.__version__,
            _sources(),
        )
    )


def _sources() -> str:
    """The digest of these sources."""
    root = Path(__file__).parent.parent
    named = map(root.joinpath, _SOURCES.split())
    paths = sorted(path for each in named for path in (each, *each.rglob("*")))
    return digest_of_sources(root, (p for p in paths if p.suffix in (".py", ".h", ".cpp")))
