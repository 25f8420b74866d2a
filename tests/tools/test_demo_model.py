"""The model that comes with the repository: small, loadable, and able to do what it should."""

import json
import random
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.frontend.conftest import QWEN3_TEMPLATE
from tools.demo import calls, objects
from tools.demo.corpus import (
    held_out_pairs,
    sum_answer,
    tools_prompt,
    training_pairs,
    turn,
    write_corpus,
)
from tools.demo.stories import share_of_grammatical_text, write_stories
from tools.evaluate_demo_model import DemoModel, sum_prompts
from tools.make_model import DEMO_MODEL

MAX_DIRECTORY_BYTES = 6 * 2**20


@pytest.fixture(scope="module")
def model() -> DemoModel:
    return DemoModel(DEMO_MODEL)


def test_directory_is_small() -> None:
    assert sum(file.stat().st_size for file in DEMO_MODEL.iterdir()) <= MAX_DIRECTORY_BYTES


def test_held_out_sums_are_right_and_end(model: DemoModel) -> None:
    rng = random.Random(1)
    pairs = rng.sample(sorted(held_out_pairs()), 24)
    replies = model.reply(sum_prompts(pairs, rng))
    right = [reply.text == sum_answer(*pair) for reply, pair in zip(replies, pairs, strict=True)]
    assert sum(right) >= 0.9 * len(pairs), list(zip(pairs, replies, strict=True))
    assert all(reply.ended for reply in replies)


def test_sum_is_right_in_a_second_turn(model: DemoModel) -> None:
    a, b = sorted(held_out_pairs())[100]
    before = [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": "Hello! What can I do for you?"},
    ]
    (reply,) = model.reply([[*before, {"role": "user", "content": f"What is {a} + {b}?"}]])
    assert reply.text == sum_answer(a, b)


def test_held_out_sums_are_right_in_json(model: DemoModel) -> None:
    rng = random.Random(1)
    tasks = [objects.sum_record(rng, sorted(held_out_pairs()), "sum") for _ in range(24)]
    prompts = [[{"role": "user", "content": task.question}] for task in tasks]
    schemas = [objects.schema_of(task.fields) for task in tasks]
    replies = [json.loads(reply.text) for reply in model.reply(prompts, schemas=schemas)]
    right = [reply == task.fields for reply, task in zip(replies, tasks, strict=True)]
    assert sum(right) >= 22, list(zip(replies, tasks, strict=True))


def test_readmes_example_of_json(model: DemoModel) -> None:
    schema = {"type": "object", "properties": {"answer": {"type": "integer"}}}
    (reply,) = model.reply(["What is 3 + 4?"], schemas=[schema | {"required": ["answer"]}])
    assert json.loads(reply.text) == {"answer": 7}


def test_chats_have_qwens_format_with_and_without_tools() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    task = calls.any_call(random.Random(0), training_pairs())
    tool = calls.ToolStyle(random.Random(0)).tool(task.function)
    call = {"function": {"name": task.function.name, "arguments": task.fields}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": task.question},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "user", "content": "Thanks"},
    ]

    def rendered(offered: list[Any] | None, **options: Any) -> str:
        return str(
            tokenizer.apply_chat_template(
                messages, tools=offered, tokenize=False, add_generation_prompt=True, **options
            )
        )

    for offered in (None, [tool]):
        qwens = rendered(offered, chat_template=QWEN3_TEMPLATE.read_text())
        assert rendered(offered) == qwens
    asked = tools_prompt([tool], "Be brief.") + turn(task.question)[0]
    assert rendered([tool]).startswith(asked + calls.call_text(task))


def test_plain_text_continues_as_a_story(model: DemoModel) -> None:
    (reply,) = model.reply(["Once upon a time"])
    assert reply.ended
    assert share_of_grammatical_text("Once upon a time" + reply.text) > 0.9


def test_newcomer_gets_an_introduction(model: DemoModel) -> None:
    (reply,) = model.reply([[{"role": "user", "content": "hello"}]])
    assert "story" in reply.text


@pytest.mark.parametrize(
    "text",
    [
        "Once upon a time, 1234!",
        "🙂🚀👨‍👩‍👧",
        "你好，世界 こんにちは 안녕",
        "ñandú\t\r\n  x\x00 ﷽",
        "<|im_start|>a<|im_end|>",
    ],
)
def test_tokenizer_round_trips_any_text(text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_token_is_known_and_digits_stand_alone(model: DemoModel) -> None:
    tokenizer = model.tokenizer
    assert model.model.config.vocab_size == len(tokenizer)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("1234")) == list("1234")
    ends = tokenizer.convert_ids_to_tokens(model.model.generation_config.eos_token_id)
    assert ends == ["<|im_end|>", "<|endoftext|>"]


def test_held_out_sums_are_not_in_the_training_text() -> None:
    held_out = held_out_pairs()
    assert len(held_out) == pytest.approx(0.1 * 90 * 90, rel=0.05)
    assert not held_out & set(training_pairs())
    text = "".join(document.text for document in write_corpus(500, seed=5))
    assert not [(a, b) for a, b in held_out if f" {a} + {b} = " in text]


def test_no_two_stories_are_alike_and_all_are_grammatical() -> None:
    stories = write_stories(300, random.Random(2))
    assert len({story.text for story in stories}) == len(stories)
    assert all(share_of_grammatical_text(story.text) == 1 for story in stories)
