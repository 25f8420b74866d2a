"""Makes a model directory of a GGUF file.

The weights stay in the file, to which the directory has a link, or one for each part. Nothing here
imports torch.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from shared.model_directory import GGUF_INDEX, GGUF_WEIGHTS
from worker_svc.errors import ModelError
from worker_svc.gguf.configuration import ROPE_FACTORS, Keys, end_tokens, family_of, model_config
from worker_svc.gguf.header import GgufError, Header
from worker_svc.gguf.parts import find_parts, model_stem, part_name, read_parts
from worker_svc.gguf.tensors import weight_index
from worker_svc.gguf.tokenizer import make_tokenizer, tokenizer_config
from worker_svc.user_cache import cache_folder, digest_of, keep, private_folder, state_of

_LAYOUT = 3  # changes with the contents of the directory
_DIGESTS = "digests.json"  # of the directory's other files; it is written last
# The files whose digests `_DIGESTS` has.
_TEXTS = (
    *("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"),
    GGUF_INDEX,
)


def unpack(file: Path, sampling: Mapping[str, float] | None = None) -> Path:
    """Returns the model directory of a GGUF file, or of all parts of a split one. It is kept in the
    user's cache directory until a file changes, and made again if it is damaged.

    Args:
        file: if split, any of the parts.
        sampling: defaults for generation_config.json.

    Raises:
        ModelError: the files cannot be used.
    """
    try:
        parts = find_parts(file)
        generation = dict(sampling or {})
        states = [f"{part.resolve(strict=True)} {state_of(part.stat())}" for part in parts]
        state = f"{_LAYOUT}{states}{json.dumps(generation)}"
        name = f"{model_stem(parts[0])}-{hashlib.sha256(state.encode()).hexdigest()[:16]}"
        with private_folder(cache_folder("gguf"), create=True):
            directory = cache_folder("gguf") / name
            links = _links(parts)
            if not _is_intact(directory, links):
                if directory.exists():
                    print(f"{directory} is damaged; making it again", file=sys.stderr)
                _make(directory, links, _texts(parts, links, generation))
            return directory
    except (GgufError, OSError) as error:
        raise ModelError(f"{file}: {error}") from error


def _links(parts: Sequence[Path]) -> dict[str, Path]:
    """The names of the directory's links, and the files to which they lead."""
    if len(parts) == 1:
        return {GGUF_WEIGHTS: parts[0]}
    stem = Path(GGUF_WEIGHTS).stem
    return {part_name(stem, n + 1, len(parts)): file for n, file in enumerate(parts)}


def _is_intact(directory: Path, links: Mapping[str, Path]) -> bool:
    """Whether all files have the bytes that were written."""
    try:
        digests = json.loads((directory / _DIGESTS).read_bytes())
        right = [digest_of(directory / name) == digests[name] for name in _TEXTS]
        right += [(directory / name).readlink() == file for name, file in links.items()]
    except (OSError, ValueError, LookupError, TypeError):
        return False
    return all(right)


def _make(directory: Path, links: Mapping[str, Path], texts: Mapping[str, str]) -> None:
    """Replaces files one by one, since a stack may read some of them at the moment."""
    directory.mkdir(mode=0o700, exist_ok=True)
    with TemporaryDirectory(dir=directory.parent) as temporary:
        made = Path(temporary, "made")
        for name, file in links.items():
            made.symlink_to(file)
            made.replace(directory / name)
        digests = {}
        for name, text in texts.items():
            made.write_text(text, encoding="utf-8")
            digests[name] = digest_of(made)
            keep(made, directory / name)
        made.write_text(json.dumps(digests))
        keep(made, directory / _DIGESTS)


def _texts(
    parts: Sequence[Path], links: Mapping[str, Path], generation: Mapping[str, float]
) -> dict[str, str]:
    """The directory's files."""
    header = read_parts(parts)
    keys = Keys(header.keys)
    family = family_of(keys)
    config = model_config(header, family)
    for name, parameter in ROPE_FACTORS.items():
        if name in header.tensors:
            config["rope_parameters"][parameter] = _vector(header, name)
    contents: dict[str, Any] = {
        "config.json": config,
        "generation_config.json": {**generation, "eos_token_id": end_tokens(keys)},
        "tokenizer_config.json": tokenizer_config(keys),
        GGUF_INDEX: weight_index(header, family, config, links),
    }
    texts = {name: json.dumps(each, ensure_ascii=False) for name, each in contents.items()}
    return {**texts, "tokenizer.json": make_tokenizer(keys).to_str()}


def _vector(header: Header, name: str) -> list[float]:
    tensor = header.tensors[name]
    if len(tensor.shape) != 1 or tensor.type is not GGMLQuantizationType.F32:
        raise GgufError(f"{name}: {tensor.type.name} {list(tensor.shape)} is not a vector of F32")
    data = np.fromfile(tensor.file, "<f4", tensor.shape[0], offset=tensor.start)
    values: list[float] = data.tolist()
    return values
