"""The model that comes with the repository: small, loadable, and able to do what it should."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.frontend.conftest import QWEN3_TEMPLATE
from tools.demo import tasks
from tools.demo.corpus import (
    TOKENIZER,
    held_out_pairs,
    tools_prompt,
    training_pairs,
    turn,
    write_corpus,
)
from tools.demo.stories import share_of_grammatical_text, write_story
from tools.evaluate_demo_model import DemoModel, calls, parsed, records, sums, texts
from tools.make_model import DEMO_MODEL

MAX_DIRECTORY_BYTES = 6 * 2**20


@pytest.fixture(scope="module")
def model() -> DemoModel:
    return DemoModel(DEMO_MODEL)


def test_directory_is_small() -> None:
    assert sum(file.stat().st_size for file in DEMO_MODEL.iterdir()) <= MAX_DIRECTORY_BYTES


@pytest.mark.parametrize(
    ("ability", "count", "missed"),
    [
        (sums, 8, {}),
        (records, 8, {"sums in JSON": 0.3, "sums in JSON, unseen shapes": 0.9}),
        (calls, 4, {}),
        (texts, 4, {}),
    ],
)
def test_abilities_on_text_that_the_model_has_not_seen(
    model: DemoModel, ability: Callable[..., dict[str, float]], count: int, missed: Any
) -> None:
    torch.manual_seed(1)
    figures = ability(model, random.Random(1), count)
    for name, share in figures.items():
        assert share >= 1 - missed.get(name, 0.25), figures
    assert all(model.ended)


def test_readmes_example_of_json(model: DemoModel) -> None:
    (reply,) = model.reply(["What is 3 + 4?"], [tasks.schema_of({"answer": 7})])
    assert parsed(reply) == {"answer": 7}


def test_chats_have_qwens_format_with_and_without_tools() -> None:
    task = tasks.any_call(random.Random(0), training_pairs(), "sum")
    call = {"function": {"name": task.function, "arguments": task.fields}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": task.question},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "user", "content": "Thanks"},
    ]

    def rendered(offered: list[Any] | None, **options: Any) -> str:
        options |= {"tokenize": False, "add_generation_prompt": True}
        return str(TOKENIZER.apply_chat_template(messages, tools=offered, **options))

    for offered in (None, [task.tool]):
        assert rendered(offered) == rendered(offered, chat_template=QWEN3_TEMPLATE.read_text())
    asked = tools_prompt([task.tool], "Be brief.") + turn(task.question)[0]
    assert rendered([task.tool]).startswith(asked + task.call_text)


def test_newcomer_gets_an_introduction_and_plain_text_a_story(model: DemoModel) -> None:
    hello, story = model.reply([model.chat("hello"), "Once upon a time"])
    assert "story" in hello
    assert share_of_grammatical_text("Once upon a time" + story) > 0.9


@pytest.mark.parametrize(
    "text",
    [
        "Once, 1234!",
        "🙂🚀👨‍👩‍👧",
        "你好，世界 안녕",
        "ñandú\t\r\n  x\x00 ﷽",
        "<|im_start|>a<|im_end|>",
    ],
)
def test_tokenizer_round_trips_any_text(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_every_token_is_known_and_digits_stand_alone(model: DemoModel) -> None:
    assert model.model.config.vocab_size == len(TOKENIZER)
    assert TOKENIZER.convert_ids_to_tokens(TOKENIZER.encode("1234")) == list("1234")
    ends = TOKENIZER.convert_ids_to_tokens(model.model.generation_config.eos_token_id)
    assert ends == ["<|im_end|>", "<|endoftext|>"]


def test_held_out_sums_are_not_in_the_training_text() -> None:
    held_out = held_out_pairs()
    assert len(held_out) == pytest.approx(0.1 * 90 * 90, rel=0.05)
    assert not held_out & set(training_pairs())
    text = "".join(piece for document in write_corpus(500, seed=5) for piece, _ in document)
    assert not [(a, b) for a, b in held_out if f" {a} + {b} = " in text]
    assert all(share_of_grammatical_text(write_story(random.Random(i)).text) == 1 for i in range(9))
