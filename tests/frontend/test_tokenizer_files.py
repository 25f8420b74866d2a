"""The archive of tokenizer files that gateways fetch."""

from __future__ import annotations

import asyncio
import io
import zipfile
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from smg_grpc_proto.generated import common_pb2 as common

from deploy.ports import free_port
from frontend.api.vllm_engine.tokenizer_files import TokenizerArchive
from frontend.settings import FrontendSettings
from frontend.text.threads import FairThreads


@pytest.fixture
def settings(settings: FrontendSettings) -> FrontendSettings:
    return settings.model_copy(update={"gateway_addresses": (f"127.0.0.1:{free_port()}",)})


async def test_the_archive_has_the_tokenizers_files(engine: Any, demo: Path) -> None:
    chunks = [chunk async for chunk in engine.GetTokenizer(common.GetTokenizerRequest())]
    data = b"".join(chunk.data for chunk in chunks)
    assert chunks[-1].sha256 == sha256(data).hexdigest()
    assert not any(chunk.sha256 for chunk in chunks[:-1])
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.read("tokenizer.json") == (demo / "tokenizer.json").read_bytes()
        assert "model.safetensors" not in archive.namelist()


async def test_the_archive_is_made_once_for_many_calls(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    make = TokenizerArchive._make

    def counted(archive: TokenizerArchive) -> tuple[bytes, str]:
        made.append(archive)
        return make(archive)

    monkeypatch.setattr(TokenizerArchive, "_make", counted)

    async def digest() -> str:
        call = engine.GetTokenizer(common.GetTokenizerRequest())
        return [chunk async for chunk in call][-1].sha256

    digests = await asyncio.gather(*(digest() for _ in range(8)))
    assert len(set(digests)) == len(made) == 1


async def test_the_archive_is_remade_when_the_files_change(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    threads = FairThreads(1, "test")
    archive = TokenizerArchive(tmp_path, partial(threads.run, ""))
    first = await archive.read()
    assert await archive.read() is first
    (tmp_path / "tokenizer.json").write_text("[1, 2]")
    assert (await archive.read())[1] != first[1]
    threads.close()
