"""An archive of a model's tokenizer files, for gateways, which tokenize prompts themselves."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile
from collections.abc import Callable
from pathlib import Path

from nano_vllm_grpc.tls import Stamp, stamp_of

Archive = tuple[bytes, str]  # the archive and its SHA-256 in hexadecimal digits
# The files that vLLM's own server of this protocol sends (smg-grpc-servicer).
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
_MADE_AT = (1980, 1, 1, 0, 0, 0)  # fixed, so that equal files make equal archives


class TokenizerArchive:
    """A ZIP archive of the tokenizer's files in `directory`. It is made at the first request, and
    again when the files have changed. Calls that ask for it at one time share the work.

    Args:
        on_thread: runs a function that would block the event loop.
    """

    def __init__(
        self,
        directory: Path,
        on_thread: Callable[[Callable[[], Archive]], asyncio.Future[Archive]],
    ) -> None:
        self._paths = [directory / name for name in _NAMES]
        self._on_thread = on_thread
        self._stamps: list[Stamp] = []
        self._making: asyncio.Future[Archive] | None = None

    async def read(self) -> Archive:
        """Returns the archive and its SHA-256 in hexadecimal digits."""
        stamps, made = [stamp_of(path) for path in self._paths], self._making
        if made is None or stamps != self._stamps or (made.done() and made.exception()):
            self._stamps = stamps
            made = self._making = self._on_thread(self._make)
        return await asyncio.shield(made)

    def _make(self) -> Archive:
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w") as file:
            for path in filter(Path.is_file, self._paths):
                entry = zipfile.ZipInfo(path.name, _MADE_AT)
                file.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
        return archive.getvalue(), hashlib.sha256(archive.getbuffer()).hexdigest()
