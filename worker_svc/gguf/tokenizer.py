"""Makes the tokenizer that a GGUF file describes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from worker_svc.gguf.configuration import Keys
from worker_svc.gguf.header import GgufError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # of tokenizer.ggml.token_type
_MAX_LENGTH = 1024  # of a token in characters; those of the served models have 256 at most
# How the families' own tokenizer.json files split texts. Llama 3 keeps up to three digits together.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _SPLIT.format(digits=r"\p{N}{1,3}")
_QWEN2 = _SPLIT.format(digits=r"\p{N}")
_WITHOUT_SPACE = ("<unk>", "<s>", "<|endoftext|>")  # of Phi-3
_SPLITS = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _LLAMA3,  # of SmolLM3
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "smollm": "digits",
    "gpt-2": "",
}


def make_tokenizer(keys: Keys) -> Tokenizer:
    """The tokenizer in the form of tokenizer.json.

    Raises:
        GgufError: a key is missing or wrong, or the tokenizer is of a kind that is not served.
    """
    tokens = keys.get("tokenizer.ggml.tokens", list)
    types = keys.get("tokenizer.ggml.token_type", list, [_NORMAL] * len(tokens))
    if not all(isinstance(token, str) for token in tokens) or len(set(tokens)) != len(tokens):
        raise GgufError("tokenizer.ggml.tokens: must be different strings")
    longest = max(map(len, tokens), default=0)
    if longest > _MAX_LENGTH:
        raise GgufError(
            f"tokenizer.ggml.tokens: a token of {longest} characters; the limit is {_MAX_LENGTH}"
        )
    if len(types) != len(tokens):
        raise GgufError(f"tokenizer.ggml.token_type: {len(types)} types of {len(tokens)} tokens")
    kind = keys.get("tokenizer.ggml.model", str)
    if kind == "gpt2":
        tokenizer = _byte_level(keys, tokens)
    elif kind == "llama":
        tokenizer = _sentence_piece(keys, tokens, types)
    else:
        raise GgufError(f"tokenizer.ggml.model: {kind} is not served; gpt2 and llama are")
    is_phi3 = kind == "llama" and keys.get("general.architecture", str, "") == "phi3"
    tokenizer.add_special_tokens(_added(tokens, types, is_phi3, special=True))
    tokenizer.add_tokens(_added(tokens, types, is_phi3, special=False))
    _add_beginning(tokenizer, keys, tokens)
    return tokenizer


def _added(
    tokens: Sequence[str], types: Sequence[int], is_phi3: bool, *, special: bool
) -> list[AddedToken]:
    """The added tokens, special or not. Those of Phi-3 take the space after them, which files do
    not say (llama.cpp knows it, too: `llama_vocab::impl::load`)."""
    kinds = (_UNKNOWN, _CONTROL) if special else (_USER_DEFINED,)
    return [
        AddedToken(
            token,
            normalized=False,
            special=special,
            rstrip=is_phi3 and token not in _WITHOUT_SPACE,
        )
        for token, kind in zip(tokens, types, strict=True)
        if kind in kinds
    ]


def tokenizer_config(keys: Keys) -> dict[str, Any]:
    """The fields of tokenizer_config.json.

    Raises:
        GgufError: a key is of the wrong type, or names a token that does not exist.
    """
    tokens = keys.get("tokenizer.ggml.tokens", list)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = _token(keys, f"{key}_token_id", tokens)
        if token is not None:
            config[f"{name}_token"] = token
    template = keys.get("tokenizer.chat_template", str, None)
    if template is not None:
        config["chat_template"] = template
    return config


def _byte_level(keys: Keys, tokens: Sequence[str]) -> Tokenizer:
    split = keys.get("tokenizer.ggml.pre", str, "gpt-2")
    if split not in _SPLITS:
        served = ", ".join(_SPLITS)
        raise GgufError(f"tokenizer.ggml.pre: {split} is not served; served are {served}")
    pattern = _SPLITS[split]
    merges = [tuple(str(merge).split(" ")) for merge in keys.get("tokenizer.ggml.merges", list)]
    tokenizer = Tokenizer(_bpe(tokens, merges, ignore_merges=pattern == _LLAMA3))
    if pattern == _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    if pattern in (_LLAMA3, _QWEN2):
        first: Any = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([first, last])
    else:
        parts: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pattern else []
        parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(keys: Keys, tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    """The form of Llama 2's own tokenizer.json."""
    scores = keys.get("tokenizer.ggml.scores", list)
    if len(scores) != len(tokens):
        raise GgufError(f"tokenizer.ggml.scores: {len(scores)} scores of {len(tokens)} tokens")
    pieces = {
        token: score
        for token, score, kind in zip(tokens, scores, types, strict=True)
        if kind in (_NORMAL, _USER_DEFINED)
    }
    unknown = _token(keys, "unknown_token_id", tokens)
    tokenizer = Tokenizer(
        _bpe(tokens, _merges(pieces), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    space = keys.get("tokenizer.ggml.add_space_prefix", bool, True)
    steps: list[Any] = [normalizers.Prepend("▁")] if space else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    parts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if space:
        parts.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def _bpe(tokens: Sequence[str], merges: Sequence[tuple[str, ...]], **options: Any) -> models.BPE:
    vocabulary = {token: number for number, token in enumerate(tokens)}
    for number, merge in enumerate(merges):
        if len(merge) != 2 or not {*merge, "".join(merge)} <= vocabulary.keys():
            raise GgufError(f"tokenizer.ggml.merges: {merge} at {number} does not merge two tokens")
    return models.BPE(vocabulary, merges, **options)  # type: ignore[arg-type]


def _merges(pieces: dict[str, float]) -> list[tuple[str, str]]:
    """The pairs that make a piece, those of the highest score first (`generate_merges` of
    transformers)."""
    merges = [
        (score, piece[:end], piece[end:])
        for piece, score in pieces.items()
        for end in range(1, len(piece))
        if piece[:end] in pieces and piece[end:] in pieces
    ]
    merges.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [(left, right) for _, left, right in merges]


def _add_beginning(tokenizer: Tokenizer, keys: Keys, tokens: Sequence[str]) -> None:
    """Lets texts begin with the token that the model expects there."""
    by_default = tokenizer.model.ignore_merges or keys.get("tokenizer.ggml.model", str) == "llama"
    bos = _token(keys, "bos_token_id", tokens)
    if bos is not None and keys.get("tokenizer.ggml.add_bos_token", bool, by_default):
        number = keys.get("tokenizer.ggml.bos_token_id", int)
        template = processors.TemplateProcessing(f"{bos} $A", f"{bos} $A {bos} $B", [(bos, number)])
        tokenizer.post_processor = template


def _token(keys: Keys, name: str, tokens: Sequence[str]) -> str | None:
    key = f"tokenizer.ggml.{name}"
    number: int | None = keys.get(key, int, None)
    if number is None:
        return None
    if not 0 <= number < len(tokens):
        raise GgufError(f"{key}: {number} is not the number of a token")
    return tokens[number]
