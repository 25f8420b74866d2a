"""Kernels in numba, which keeps what it has compiled.

It would compile a function again when the function's own file has changed, but not when another
that it calls has: the cache's place is therefore named after the content of all of them.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numba


def _cache_dir() -> Path:
    """Beside the files, or in the user's cache directory if that cannot be written to."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(here.glob("*.py")):
        digest.update(path.read_bytes())
    place = here / "__pycache__"
    if not os.access(place if place.exists() else here, os.W_OK):
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        place = Path(home) / "nano-vllm-grpc"
    return place / f"numba-{digest.hexdigest()[:16]}"


numba.config.CACHE_DIR = numba.config.CACHE_DIR or str(_cache_dir())
