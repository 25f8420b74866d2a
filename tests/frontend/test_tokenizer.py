"""Tokenizing, compared with transformers, and bad tokenizer files."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from frontend.text.model_files import ModelFilesError
from frontend.text.tokenizer import Tokenizer
from nano_vllm_grpc.pb import frontend_pb2 as pb
from shared.errors import InvalidArgumentError
from shared.model_directory import MAX_TOKENIZER_BYTES


@pytest.fixture(scope="module")
def tokenizer(demo: Path) -> Iterator[Tokenizer]:
    tokenizer = Tokenizer(demo, threads=2)
    yield tokenizer
    tokenizer.close()


@pytest.fixture
def copy(demo: Path, tmp_path: Path) -> Path:
    """A copy of the demo model's tokenizer, for tests to break."""
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(demo / name, tmp_path)
    return tmp_path


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    "text", ["", "Once upon a time", "你好 👍🏽 é", "a<|im_start|>b<|endoftext|>", " \n\n\t x "]
)
async def test_text_is_tokenized_as_by_transformers(
    text: str, tokenizer: Tokenizer, hf: Any
) -> None:
    assert await tokenizer.encode_text(text) == hf(text).input_ids


async def test_decode_leaves_special_tokens_out(tokenizer: Tokenizer, hf: Any) -> None:
    ids = hf("<|im_start|>user\nnaïve 👍<|im_end|>").input_ids
    assert await tokenizer.decode(ids) == "user\nnaïve 👍"


async def test_event_loop_goes_on_while_a_long_text_is_tokenized(tokenizer: Tokenizer) -> None:
    work = asyncio.create_task(tokenizer.encode_text("a quick brown fox " * 20_000))
    turns = 0
    while not work.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 10  # on the loop's own thread one or two would do


async def test_text_that_cannot_fit_is_rejected_before_it_is_tokenized(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*args: object, **kwargs: object) -> None:
        raise AssertionError("tokenized")

    monkeypatch.setattr(tokenizer, "_backend", unreachable)
    with pytest.raises(InvalidArgumentError, match=r"^text: 4000000 bytes .* limit is 100"):
        await tokenizer.encode_text("x" * 4_000_000, max_tokens=100)
    long = pb.ChatMessage(role="user", content="x" * 4_000_000)
    with pytest.raises(InvalidArgumentError, match=r"^chat: "):
        await tokenizer.encode_chat(pb.Chat(messages=[long]), max_tokens=100)


async def test_text_that_just_fits_is_never_rejected(tokenizer: Tokenizer, hf: Any) -> None:
    longest = max(hf.get_vocab(), key=len)
    word = hf.convert_tokens_to_string([longest])
    for text in (word * 50, "\u1fbe\u0308\u0301" * 50):  # the second shrinks when normalized
        expected = hf(text).input_ids
        assert await tokenizer.encode_text(text, max_tokens=len(expected)) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "chat: this model has no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "{}: roles must alternate"),
        # Neither the chat nor the template's code is quoted.
        ("{{ raise_exception(messages[0].content) }}", "{}"),
        ("{{ messages[0].content / 0 }}", "{}"),
    ],
)
async def test_a_chat_that_the_template_rejects(
    copy: Path, template: str | None, message: str
) -> None:
    edit(copy / "tokenizer_config.json", chat_template=template)
    tokenizer = Tokenizer(copy, threads=1)
    with pytest.raises(InvalidArgumentError) as caught:
        await tokenizer.encode_chat(pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")]))
    assert str(caught.value) == message.format("chat: the chat template failed")
    tokenizer.close()


def test_a_template_of_a_processor(copy: Path) -> None:
    edit(copy / "tokenizer_config.json", chat_template=None)
    (copy / "chat_template.json").write_text('{"chat_template": "[{{ messages[0].content }}]"}')
    tokenizer = Tokenizer(copy, threads=1)
    assert tokenizer.chat_template == "[{{ messages[0].content }}]"
    tokenizer.close()


def test_a_decoder_that_is_not_byte_level_is_rejected_by_name(copy: Path) -> None:
    edit(copy / "tokenizer.json", decoder={"type": "Fuse"})
    edit(copy / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    edit(copy / "config.json", model_type="unheard-of")
    with pytest.raises(ModelFilesError, match="Fuse"):
        Tokenizer(copy, threads=1)


def test_a_broken_tokenizer_file_is_rejected(copy: Path) -> None:
    (copy / "tokenizer.json").write_text("{")
    with pytest.raises(ModelFilesError, match="the tokenizer cannot be loaded"):
        Tokenizer(copy, threads=1)


def test_code_beside_the_tokenizer_is_not_run(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers would ask on the terminal whether to run it."""
    monkeypatch.setattr("builtins.input", lambda prompt: "y")
    (copy / "evil.py").write_text(f"open({str(copy / 'ran')!r}, 'w')")
    own = {"AutoTokenizer": [None, "evil.Tokenizer"]}
    edit(copy / "tokenizer_config.json", auto_map=own, tokenizer_class="UnheardOfTokenizer")
    edit(copy / "config.json", model_type="unheard-of", auto_map={"AutoConfig": "evil.Config"})
    with pytest.raises(ModelFilesError, match="trust_remote_code"):
        Tokenizer(copy, threads=1)
    assert not (copy / "ran").exists()


@pytest.mark.parametrize("name", ["../tokenizer.9.json", "/tmp/tokenizer.9.json", 9])
def test_tokenizer_files_elsewhere_are_rejected(name: object, copy: Path) -> None:
    edit(copy / "tokenizer_config.json", fast_tokenizer_files=["tokenizer.json", name])
    named = f"tokenizer_config.json: fast_tokenizer_files: {name!r} is not the name of a file"
    with pytest.raises(ModelFilesError, match=re.escape(named)):
        Tokenizer(copy, threads=1)


def test_a_tokenizer_file_that_is_too_large_or_none_is_rejected(copy: Path) -> None:
    with (copy / "tokenizer.json").open("ab") as file:
        file.truncate(MAX_TOKENIZER_BYTES + 1)
    with pytest.raises(ModelFilesError, match=r"tokenizer\.json: 134217729 bytes; the limit is"):
        Tokenizer(copy, threads=1)
    (copy / "tokenizer.json").unlink()
    (copy / "merges.txt").symlink_to("/dev/zero")
    with pytest.raises(ModelFilesError, match=r"merges\.txt: not a regular file"):
        Tokenizer(copy, threads=1)
