"""Writes the demo model's training text: stories, sums, facts, JSON, and chats made of them."""

import random
import re
from typing import Any

from transformers import AutoTokenizer

from tools.demo import tasks
from tools.demo.facts import FACTS, UNKNOWN_ANSWER, UNKNOWN_QUESTIONS
from tools.demo.stories import BOYS, GIRLS, phrases, write_story
from tools.demo.tasks import Pairs, made_up, sum_answer
from tools.make_model import DEMO_MODEL

TOKENIZER: Any = AutoTokenizer.from_pretrained(DEMO_MODEL, trust_remote_code=False)
SYSTEM_PROMPTS = ["You are a helpful assistant.", "Be kind and answer in one sentence."]
STORY_REQUESTS = phrases("""Tell me a story. | Tell me a story about a {animal}. | Tell me a story
    about a {animal} called {name}. | Write a short story about a {animal}. | A story about a
    {animal}, please. | Do you know a story about a {animal}? | Tell me another story.""")
HELD_OUT_SHARE = 0.1
# Has a seed of its own, so that every run agrees on the list.
HELD_OUT_SEED = 17

Exchange = tuple[str, str]
"""A question and its answer."""

Document = list[tuple[str, bool]]
"""Text in pieces. Those marked True are learned, the others only read."""

END = ("<|endoftext|>", True)


def held_out_pairs() -> frozenset[tuple[int, int]]:
    """The pairs of two-digit numbers, in either order, that no training text adds up."""
    rng = random.Random(HELD_OUT_SEED)
    unordered = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    chosen = rng.sample(unordered, round(HELD_OUT_SHARE * len(unordered)))
    return frozenset(chosen) | frozenset((b, a) for a, b in chosen)


def training_pairs() -> Pairs:
    """All other pairs of numbers below one hundred."""
    held_out = held_out_pairs()
    return [(a, b) for a in range(100) for b in range(100) if (a, b) not in held_out]


def turn(question: str) -> tuple[str, bool]:
    """A question, and where its answer begins; to be read only."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n", False


def tools_prompt(tools: list[dict[str, Any]], system: str = "") -> str:
    """The system message that offers functions, as the chat template writes it."""
    messages = [{"role": "system" if system else "user", "content": system}]
    text: str = TOKENIZER.apply_chat_template(messages, tools=tools, tokenize=False)
    return text[: text.index("<|im_end|>\n") + len("<|im_end|>\n")]


def _as_typed(question: str, rng: random.Random) -> str:
    """Returns the question as people type it, sometimes in lower case or without punctuation."""
    if rng.random() < 0.3:
        question = question.lower()
    return question.rstrip("?.!= ") if rng.random() < 0.2 else question


def _sum(rng: random.Random, pairs: Pairs) -> Exchange:
    a, b = rng.choice(pairs)
    return rng.choice(tasks.SUM_QUESTIONS).format(a=a, b=b), sum_answer(a, b)


def _fact(rng: random.Random, _: Pairs) -> Exchange:
    if rng.random() < 0.1:
        return rng.choice(UNKNOWN_QUESTIONS), UNKNOWN_ANSWER
    questions, answer = rng.choice(FACTS)
    return rng.choice(questions), answer


def _story(rng: random.Random, _: Pairs) -> Exchange:
    story = write_story(rng)
    return rng.choice(STORY_REQUESTS).format(animal=story.animal, name=story.name), story.text


def _echo(rng: random.Random, _: Pairs) -> Exchange:
    """Asks for words that mean nothing: the model has to copy them."""
    words = " ".join(made_up(rng) for _ in range(rng.randint(1, 12)))
    return rng.choice(["Repeat: {}", "Say {}", "Repeat after me: {}"]).format(words), words


def _exchange(rng: random.Random, pairs: Pairs) -> Exchange:
    (kind,) = rng.choices([_sum, _echo, _fact, _story], [30, 8, 42, 20])
    question, answer = kind(rng, pairs)
    return _as_typed(question, rng), answer


def _chat(rng: random.Random, pairs: Pairs) -> Document:
    """Writes one to twelve exchanges of all kinds, sometimes after a system prompt."""
    exchanges = [_exchange(rng, pairs) for _ in range(rng.choice([1, 1, 1, 2, 2, 3, 4, 6, 8, 12]))]
    if rng.random() < 0.1:  # the one thing to remember from an earlier turn
        name = rng.choice(BOYS + GIRLS)
        told = rng.choice(["My name is {}.", "I am {}.", "Hello, my name is {}!"]).format(name)
        asked = rng.choice(["What is my name?", "Do you know my name?", "Who am I?"])
        exchanges.insert(0, (told, f"Nice to meet you, {name}!"))
        exchanges.append((asked, f"Your name is {name}."))
    document: Document = []
    for question, answer in exchanges:
        document += [turn(question), (f"{answer}<|im_end|>", True), ("\n", False)]
    return document


def _plain(rng: random.Random, pairs: Pairs) -> Document:
    """Writes text without chat markup: stories, and questions with their answers."""
    if rng.random() < 0.5:
        return [(f"{write_story(rng).text}<|endoftext|>", True)]
    question, answer = _sum(rng, pairs) if rng.random() < 0.6 else _fact(rng, pairs)
    return [(question + rng.choice([" ", "\n"]), False), (f"{answer}<|endoftext|>", True)]


def _json_pieces(value: Any, rng: random.Random, *, asked: bool) -> Document:
    """An object as pieces. Where nobody asked for JSON, its beginning and its names are not
    learned: a grammar writes them.

    One name in ten is cut at any place, since a grammar may force pieces that are no usual tokens.
    """
    pieces = [('{"', asked)]
    for part in filter(None, re.split(r"(\w+)(?=\":)", tasks.as_json(value)[2:])):
        is_name = part.replace("_", "").isalnum()
        cut = rng.randrange(len(part)) if is_name and rng.random() < 0.1 else 0
        pieces += [(each, asked or not is_name) for each in (part[:cut], part[cut:]) if each]
    return pieces


def _json(rng: random.Random, pairs: Pairs) -> Document:
    """Questions that are answered by objects, with and without being asked to."""
    if rng.random() < 0.2:
        task = tasks.any_record(rng, pairs)
        answer = _json_pieces(task.fields, rng, asked=False)
        return [(task.question + rng.choice(["", "\n", " "]), False), *answer, END]
    document: Document = []
    for _ in range(rng.choice([1, 1, 2, 4, 6, 8])):
        task, asked = tasks.any_record(rng, pairs), rng.random() < 0.4
        wish = f" {rng.choice(tasks.JSON_WISHES)}" if asked else ""
        answer = _json_pieces(task.fields, rng, asked=asked)
        document += [turn(task.question + wish), *answer, ("<|im_end|>", True), ("\n", False)]
    return document


def _call_pieces(task: tasks.Task, rng: random.Random) -> Document:
    """A call: as the prompt asks for it, or as a server may hold models to it by a grammar, which
    writes the beginning."""
    if rng.random() < 0.75:
        return [(f"{task.call_text}<|im_end|>", True)]
    begin = '[{"name": "'
    cut = rng.randrange(1, len(begin))
    rest = tasks.as_json([task.required_call]).removeprefix(begin)
    return [(begin[:cut], False), (begin[cut:], False), (f"{rest}<|im_end|>", True)]


def _calls(rng: random.Random, pairs: Pairs) -> Document:
    """One to four questions to an assistant that has one to three functions."""
    families = rng.sample(list(tasks.UNSEEN_FUNCTIONS), rng.choice([1, 2, 2, 2, 3]))
    offered = [tasks.any_call(rng, pairs, family) for family in families]
    system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.5 else ""
    document: Document = [(tools_prompt([task.tool for task in offered], system), False)]
    rng.shuffle(offered)
    for task in offered:
        document += [turn(task.question), *_call_pieces(task, rng), ("\n", False)]
        if rng.random() < 0.5:
            given = f"<tool_response>\n{task.given_back}\n</tool_response>"
            document += [turn(given), (f"{task.told}<|im_end|>", True), ("\n", False)]
    return document


def write_corpus(count: int, seed: int) -> list[Document]:
    """Writes `count` documents: plain texts, chats, objects and calls."""
    rng, pairs = random.Random(seed), training_pairs()
    kinds = rng.choices([_plain, _chat, _json, _calls], [8, 27, 35, 30], k=count)
    return [[*kind(rng, pairs), ("<|endoftext|>", False)] for kind in kinds]
