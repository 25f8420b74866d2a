"""Has processes collect old objects as often as Python does by itself, whatever
`shared.process.run` asks for. Every Python process that has this directory in PYTHONPATH runs this
as it starts."""

from __future__ import annotations

import gc

gc.set_threshold = lambda *_: None  # type: ignore[assignment]
