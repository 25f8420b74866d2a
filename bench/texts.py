"""Tokens of real text: this project's own documents, or other files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from worker_svc.step.wire import Int32s

_ROOT = Path(__file__).parents[1]
DOCUMENTS = (_ROOT / "README.md", *sorted((_ROOT / "docs").rglob("*.md")), _ROOT / "CHANGELOG.md")


def read_tokens(model: Path, files: Iterable[Path] = DOCUMENTS) -> Int32s:
    """The token ids of text files, one after the other, from the tokenizer of a model directory.

    Raises:
        OSError, UnicodeDecodeError: a file cannot be read.
    """
    tokenizer: Any = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    texts = [path.read_text(encoding="utf-8") for path in files]
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return np.concatenate([np.array(each, np.int32) for each in ids])
