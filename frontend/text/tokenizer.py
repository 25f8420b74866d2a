"""Turns texts and chats into token ids, on threads of its own."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from tokenizers import normalizers

from frontend.callers.call import CALL
from frontend.callers.tracing import part_of_call
from frontend.text.chat_template import ChatTemplate
from frontend.text.conversation import read_conversation
from frontend.text.detokenizer import IncrementalDetokenizer
from frontend.text.model_files import ModelFilesError, check_tokenizer_files, processors_template
from frontend.text.threads import FairThreads
from nano_vllm_grpc.pb import frontend_pb2 as pb
from shared.errors import InvalidArgumentError
from shared.vocabulary import read_vocabulary

Result = TypeVar("Result")
# Of Llama 2.
_NEVER_SHORTER = (
    {"type": "Prepend", "prepend": "▁"},
    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
)


class Tokenizer:
    """A model's own fast tokenizer and chat template, and the bytes of its tokens.

    Special tokens that are spelled out in a text or in a chat's content are read as special tokens,
    as in transformers.
    """

    def __init__(self, directory: Path, threads: int) -> None:
        """Loads the tokenizer in `directory`.

        Raises:
            ModelFilesError: there is no tokenizer, or it is of a kind that is not served.
        """
        self._hf = _load(directory)
        self._backend = self._hf.backend_tokenizer
        self._template = ChatTemplate(self._hf)
        self.chat_template = _text_of(self._hf.chat_template)
        self._threads = FairThreads(threads, "tokenizer")
        # A model's template may end turns with a token that its configuration leaves out.
        end: int | None = self._hf.eos_token_id
        self.eos_token_ids = () if end is None else (end,)
        added = self._backend.get_added_tokens_decoder()
        try:
            self.vocabulary = read_vocabulary(self._backend)
        except ValueError as error:
            raise ModelFilesError(f"{directory}: tokenizer: {error}") from error
        # Here special tokens have no bytes.
        special = {token_id: b"" for token_id, token in added.items() if token.special}
        self.text_vocabulary = replace(
            self.vocabulary, tokens={**self.vocabulary.tokens, **special}
        )
        longest = max(map(len, self.vocabulary.tokens.values()))
        self._max_bytes_per_token = longest * _shrink_bound(self._backend.normalizer)

    async def encode_text(self, text: str, max_tokens: int | None = None) -> list[int]:
        """Encodes a plain text, including the special tokens that the tokenizer itself adds.

        Args:
            max_tokens: a text that is certain to have more is rejected without counting them.

        Raises:
            InvalidArgumentError: the text has more than `max_tokens`.
        """
        with part_of_call("tokenize"):
            return await self.on_thread(
                lambda: self._encode("text", text, max_tokens, special=True)
            )

    async def encode_chat(self, chat: pb.Chat, max_tokens: int | None = None) -> list[int]:
        """Encodes a chat, up to where the assistant's answer begins.

        Args:
            max_tokens: as for `encode_text`.

        Raises:
            InvalidArgumentError: a field is wrong, the template rejects it, or it is too long.
        """

        def encode() -> list[int]:
            text = self._template.render(read_conversation(chat))
            return self._encode("chat", text, max_tokens, special=False)

        with part_of_call("tokenize"):
            return await self.on_thread(encode)

    async def encode_pair(
        self, query: str, document: str, instruction: str, max_tokens: int
    ) -> list[int]:
        """Encodes the question whether a document is relevant to a query.

        Args:
            instruction, max_tokens: as for `ChatTemplate.render_pair` and `encode_text`.

        Raises:
            InvalidArgumentError: the template rejects it, or it is too long.
        """

        def encode() -> list[int]:
            text = self._template.render_pair(query, document, instruction)
            return self._encode("document", text, max_tokens, special=False)

        with part_of_call("tokenize"):
            return await self.on_thread(encode)

    def token_id(self, text: str) -> int | None:
        """The token that is exactly this text, if there is one."""
        found: int | None = self._backend.token_to_id(text)
        return found

    def is_special(self, text: str) -> bool:
        """Whether a text is a special token, which completions omit by default."""
        token_id = self._backend.token_to_id(text)
        return token_id is not None and not self.text_vocabulary.tokens.get(token_id)

    async def encode_words(self, words: Sequence[str]) -> list[list[int]]:
        """Encodes each word alone, without special tokens."""
        encode = self._backend.encode_batch_fast
        words = list(words)
        found = await self.on_thread(lambda: encode(words, add_special_tokens=False))
        return [encoding.ids for encoding in found]

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Decodes `token_ids` like a completion's text, without special tokens."""

        def decode() -> str:
            detokenizer = IncrementalDetokenizer(self.text_vocabulary)
            return detokenizer.feed(token_ids) + detokenizer.flush()

        return await self.on_thread(decode)

    async def on_thread(self, work: Callable[[], Result]) -> Result:
        """Runs `work`, which would block the event loop, on a thread at the turn of the call's
        client."""
        call = CALL.get()
        return await self._threads.run(call.caller if call else "", work)

    def close(self) -> None:
        """Lets the threads end. Call it when nothing is queued."""
        self._threads.close()

    def _encode(self, field: str, text: str, max_tokens: int | None, *, special: bool) -> list[int]:
        if max_tokens is not None:
            size = len(text.encode())
            min_tokens = int(size / self._max_bytes_per_token)
            if min_tokens > max_tokens:
                raise InvalidArgumentError(
                    field,
                    f"{size} bytes are at least {min_tokens} tokens; the limit is {max_tokens}",
                )
        # The tokenizer's only call that releases the interpreter's lock from beginning to end.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=special)
        if max_tokens is not None and len(encoding) > max_tokens:
            # Checked before the ids, which may be millions, become Python integers.
            raise InvalidArgumentError(field, f"{len(encoding)} tokens; the limit is {max_tokens}")
        ids: list[int] = encoding.ids
        return ids


def _text_of(template: str | dict[str, str] | None) -> str:
    """The chat template, or one after the other if there are several; empty if there is none."""
    return "".join(template.values()) if isinstance(template, dict) else template or ""


def _shrink_bound(normalizer: Any) -> float:
    """An upper bound on the factor by which `normalizer` may shorten a text, in bytes."""
    if normalizer is None:
        return 1
    if isinstance(normalizer, normalizers.NFC):
        # The worst case: U+1FBE U+0308 U+0301, 7 bytes, become U+0390, 2 bytes.
        return 3.5
    parts = json.loads(normalizer.__getstate__()).get("normalizers", [])
    return 1 if all(part in _NEVER_SHORTER for part in parts) and parts else math.inf


def import_auto_tokenizer() -> Any:
    """Imports AutoTokenizer late. It takes seconds, and `python -m frontend` hides torch first."""
    from transformers import AutoTokenizer

    return AutoTokenizer


def _load(directory: Path) -> Any:
    """Loads the transformers tokenizer."""
    check_tokenizer_files(directory)
    try:
        tokenizer = import_auto_tokenizer().from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # a broken file may cause any kind of exception
        raise ModelFilesError(f"{directory}: the tokenizer cannot be loaded: {error}") from error
    if not tokenizer.is_fast:
        raise ModelFilesError(f"{directory}: {type(tokenizer).__name__} is not a fast tokenizer")
    if not tokenizer.chat_template:
        tokenizer.chat_template = processors_template(directory)
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    return tokenizer
