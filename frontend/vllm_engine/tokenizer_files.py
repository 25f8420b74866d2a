"""The files of a model's tokenizer as one archive, for who tokenizes elsewhere."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

# As vLLM's own server of this protocol has them (smg-grpc-servicer).
_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
)
_MADE_AT = (1980, 1, 1, 0, 0, 0)  # the same files make the same archive


def tokenizer_archive(directory: Path) -> bytes:
    """A ZIP archive of the tokenizer's files in `directory`."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        for path in (directory / name for name in _NAMES):
            if path.is_file():
                entry = zipfile.ZipInfo(path.name, _MADE_AT)
                file.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
    return archive.getvalue()
