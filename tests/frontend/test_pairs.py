"""The question whether a document is relevant to a query, as models' templates render it."""

from __future__ import annotations

from pathlib import Path

import pytest

from frontend.text.tokenizer import Tokenizer
from shared.errors import InvalidArgumentError
from tests.frontend.conftest import link_with_qwen3_template


def tokenizer_with(directory: Path, template: str) -> Tokenizer:
    link_with_qwen3_template(directory)
    (directory / "chat_template.jinja").unlink()
    (directory / "chat_template.jinja").write_text(template)
    return Tokenizer(directory, threads=1)


QWEN3_RERANKER = """<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. \
Note that the answer can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: %s
<Query>: Who?
<Document>: Anna.<|im_end|>
<|im_start|>assistant
<think>

</think>

"""
# As of sentence-transformers: it renders a query and a document, and their instruction.
PAIRS = (
    "{% for m in messages %}{% if m.role in ('system', 'query', 'document') %}"
    "[{{ m.role }}] {{ m.content }}\n{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("instruction", ["", "Find people."])
async def test_pairs_are_rendered_as_the_model_was_trained(
    tmp_path: Path, instruction: str
) -> None:
    """By Qwen3's template they are what Qwen3-Reranker's page builds of texts."""
    link_with_qwen3_template(tmp_path)
    tokenizer = Tokenizer(tmp_path, threads=1)
    ids = await tokenizer.encode_pair("Who?", "Anna.", instruction, 1000)
    default = "Given a web search query, retrieve relevant passages that answer the query"
    text = QWEN3_RERANKER % (instruction or default)
    (expected,) = await tokenizer.encode_words([text])
    assert ids == expected
    tokenizer.close()


@pytest.mark.parametrize("instruction", ["", "Find people."])
async def test_a_template_may_have_roles_for_pairs(tmp_path: Path, instruction: str) -> None:
    own = tokenizer_with(tmp_path, PAIRS)
    ids = await own.encode_pair("Who?", "Anna.", instruction, 1000)
    system = f"[system] {instruction}\n" if instruction else ""
    (expected,) = await own.encode_words([f"{system}[query] Who?\n[document] Anna.\n"])
    assert ids == expected
    with pytest.raises(InvalidArgumentError, match=f"{len(ids)} tokens; the limit is 5"):
        await own.encode_pair("Who?", "Anna.", instruction, 5)
    own.close()


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        # It has no system message, or leaves it out.
        (
            "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('No.') }}"
            "{% endif %}<{{ m.content }}>{% endfor %}",
            "<JUDGE\nUSER>",
        ),
        (
            "{% for m in messages if m.role == 'user' %}<{{ m.content }}>{% endfor %}",
            "<JUDGE\nUSER>",
        ),
        # It has roles for pairs, but no instruction.
        (
            "{% for m in messages if m.role in ('query', 'document', 'user') %}<{{ m.content }}>"
            "{% endfor %}",
            "<JUDGE\nUSER>",
        ),
        # It begins to think.
        (
            "{% for m in messages %}<{{ m.content | trim }}>{% endfor %}<think>\n",
            "<JUDGE><USER><think>\n\n</think>\n\n",
        ),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", None),
        ("{% for m in %}", None),
    ],
)
async def test_every_part_of_a_pair_is_rendered(
    tmp_path: Path, template: str, expected: str | None
) -> None:
    own = tokenizer_with(tmp_path, template)
    if expected is None:
        with pytest.raises(InvalidArgumentError, match="the chat template"):
            await own.encode_pair("Who?", "Anna.", "Find.", 1000)
    else:
        text = QWEN3_RERANKER % "Find."
        judge, user = text.split("<|im_end|>\n")[:2]
        judge, user = (part.split("\n", 1)[1] for part in (judge, user))
        right = expected.replace("JUDGE", judge).replace("USER", user)
        (ids,) = await own.encode_words([right])
        assert await own.encode_pair("Who?", "Anna.", "Find.", 1000) == ids
    own.close()
