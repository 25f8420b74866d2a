"""Makes a model directory of a GGUF file.

The weights stay in the file, to which the directory has a link. Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from deploy.errors import LaunchError
from deploy.gguf.configuration import ROPE_FACTORS, Keys, end_tokens, family_of, model_config
from deploy.gguf.header import GgufError, Header, read_header
from deploy.gguf.tensors import weight_index
from deploy.gguf.tokenizer import make_tokenizer, tokenizer_config
from shared.model_directory import GGUF_INDEX, GGUF_WEIGHTS
from worker_svc.user_cache import cache_folder, private_folder

_LAYOUT = 2  # changes with the contents of the directory


def unpack(file: Path, sampling: Mapping[str, float] | None = None) -> Path:
    """Returns the model directory of a GGUF file, which is kept in the user's cache directory until
    the file changes.

    Args:
        sampling: defaults for generation_config.json.

    Raises:
        LaunchError: the file cannot be used.
    """
    try:
        file = file.resolve(strict=True)
        status = file.stat()
        generation = dict(sampling or {})
        state = f"{_LAYOUT} {file} {status.st_size} {status.st_mtime_ns} {status.st_ino}"
        state += json.dumps(generation)
        name = f"{file.stem}-{hashlib.sha256(state.encode()).hexdigest()[:16]}"
        with private_folder(cache_folder("gguf"), create=True):
            directory = cache_folder("gguf") / name
            if not directory.is_dir():
                _make(directory, file, generation)
            return directory
    except (GgufError, OSError) as error:
        raise LaunchError(f"MODEL: {file}: {error}") from error


def _make(directory: Path, file: Path, generation: dict[str, float]) -> None:
    with tempfile.TemporaryDirectory(dir=directory.parent) as parent:
        made = Path(parent) / "model"
        made.mkdir()
        for name, text in _texts(read_header(file), file, generation).items():
            (made / name).write_text(text, encoding="utf-8")
        (made / GGUF_WEIGHTS).symlink_to(file)
        try:
            made.rename(directory)
        except OSError:
            if not directory.is_dir():  # another process has made it
                raise


def _texts(header: Header, file: Path, generation: dict[str, float]) -> dict[str, str]:
    """The directory's files."""
    keys = Keys(header.keys)
    family = family_of(keys)
    config = model_config(header, family)
    if ROPE_FACTORS in header.tensors:
        config["rope_parameters"]["frequency_factors"] = _vector(header, ROPE_FACTORS, file)
    contents: dict[str, Any] = {
        "config.json": config,
        "generation_config.json": {**generation, "eos_token_id": end_tokens(keys)},
        "tokenizer_config.json": tokenizer_config(keys),
        GGUF_INDEX: weight_index(header, family, config),
    }
    texts = {name: json.dumps(each, ensure_ascii=False) for name, each in contents.items()}
    return {**texts, "tokenizer.json": make_tokenizer(keys).to_str()}


def _vector(header: Header, name: str, file: Path) -> list[float]:
    tensor = header.tensors[name]
    if len(tensor.shape) != 1 or tensor.type is not GGMLQuantizationType.F32:
        raise GgufError(f"{name}: {tensor.type.name} {list(tensor.shape)} is not a vector of F32")
    values: list[float] = np.fromfile(file, "<f4", tensor.shape[0], offset=tensor.start).tolist()
    return values
