"""Writes the demo model's training text: stories, sums, facts, JSON, and chats made of them."""

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tools.demo import calls, objects
from tools.demo.facts import FACTS, UNKNOWN_ANSWER, UNKNOWN_QUESTIONS, UNKNOWN_TOPICS
from tools.demo.names import made_up
from tools.demo.objects import sum_answer
from tools.demo.stories import BOYS, GIRLS, Story, write_stories
from tools.demo.tokenizer import TOOLS_BEGIN, TOOLS_END

SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "You are a friendly assistant. Answer briefly.",
    "Be kind and answer in one sentence.",
]
SUM_PHRASINGS = [
    "What is {a} + {b}?",
    "What is {a} plus {b}?",
    "{a} + {b}",
    "{a}+{b}",
    "{a} + {b} =",
    "{a}+{b}=?",
    "Add {a} and {b}.",
    "How much is {a} + {b}?",
    "Can you add {a} and {b}?",
    "What is the sum of {a} and {b}?",
    "Calculate {a} + {b}.",
    "What's {a}+{b}?",
    "And {a} + {b}?",
]
STORY_REQUESTS = [
    "Tell me a story.",
    "Tell me a story about a {animal}.",
    "Tell me a story about a {animal} called {name}.",
    "Please tell me a story about a {animal} named {name}.",
    "Write a short story about a {animal}.",
    "Can you tell me a story about {name}?",
    "Do you know a story about a {animal}?",
    "A story about a {animal}, please.",
    "Tell me another story.",
    "Tell me a short story about {name} the {animal}.",
]
UNKNOWN_TOPIC_PHRASINGS = [
    "What is {topic}?",
    "Tell me about {topic}.",
    "Explain {topic} to me.",
    "What is the capital of {topic}?",
    "Why do people like {topic}?",
    "Who invented {topic}?",
]
REFUSED_SUM_ANSWER = "I am sorry, I can only add numbers below one hundred."
# As many as an hour of training reads once.
DOCUMENTS = 100_000
HELD_OUT_SHARE = 0.1
# Has a seed of its own, so that every run agrees on the list.
HELD_OUT_SEED = 17

Exchange = tuple[str, str]
"""A question and its answer."""


@dataclass
class Document:
    """Text in pieces. Those marked True are learned, the others only read."""

    pieces: list[tuple[str, bool]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(piece for piece, _ in self.pieces)


def held_out_pairs() -> frozenset[tuple[int, int]]:
    """The pairs of two-digit numbers, in either order, that no training text adds up."""
    rng = random.Random(HELD_OUT_SEED)
    unordered = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    chosen = rng.sample(unordered, round(HELD_OUT_SHARE * len(unordered)))
    return frozenset(chosen) | frozenset((b, a) for a, b in chosen)


def training_pairs() -> list[tuple[int, int]]:
    """All other pairs of numbers below one hundred."""
    held_out = held_out_pairs()
    return [(a, b) for a in range(100) for b in range(100) if (a, b) not in held_out]


def _sum_exchange(rng: random.Random, pairs: list[tuple[int, int]]) -> Exchange:
    a, b = rng.choice(pairs)
    return _as_typed(rng.choice(SUM_PHRASINGS).format(a=a, b=b), rng), sum_answer(a, b)


def _refused_sum_exchange(rng: random.Random) -> Exchange:
    """Asks for arithmetic that the model has not learned, which it says."""
    if rng.random() < 0.5:
        a, b, operator = rng.randrange(100), rng.randrange(100), rng.choice("-*/")
    else:
        a, b, operator = rng.randrange(100, 10000), rng.randrange(1000), "+"
    return f"What is {a} {operator} {b}?", REFUSED_SUM_ANSWER


def _as_typed(question: str, rng: random.Random) -> str:
    """Returns the question as people type it, sometimes in lower case or without punctuation."""
    if rng.random() < 0.3:
        question = question.lower()
    if rng.random() < 0.2:
        question = question.rstrip("?.!=").rstrip()
    return question


def _fact_exchange(rng: random.Random) -> Exchange:
    if rng.random() < 0.85:
        questions, answer = rng.choice(FACTS)
        question = rng.choice(questions)
    else:
        topic = rng.choice(UNKNOWN_TOPIC_PHRASINGS).format(topic=rng.choice(UNKNOWN_TOPICS.split()))
        question, answer = rng.choice([*UNKNOWN_QUESTIONS, topic, topic]), UNKNOWN_ANSWER
    return _as_typed(question, rng), answer


def _story_exchange(rng: random.Random, story: Story) -> Exchange:
    request = rng.choice(STORY_REQUESTS).format(animal=story.animal, name=story.name)
    return _as_typed(request, rng), story.text


def _echo_exchange(rng: random.Random, most: int = 5) -> Exchange:
    """Asks for words that mean nothing: the model has to copy them."""
    words = " ".join(made_up(rng) for _ in range(rng.randint(1, most)))
    return rng.choice(["Repeat: {}", "Say {}", "Repeat after me: {}"]).format(words), words


def _lookup_document(rng: random.Random) -> Document:
    """Words and what they stand for; then questions for either, by the other."""
    pairs = [
        (
            made_up(rng),
            " ".join(made_up(rng) for _ in range(rng.randint(1, 2))),
        )
        for _ in range(rng.randint(2, 6))
    ]
    between = rng.choice([": ", " = ", " - ", " means "])
    exchanges = [("\n".join(f"{word}{between}{meaning}" for word, meaning in pairs), "OK.")]
    for word, meaning in rng.choices(pairs, k=rng.randint(3, 8)):
        if rng.random() < 0.4:
            exchanges.append((f"What is {word}?", meaning))
        else:
            exchanges.append((f"Which is {meaning}?", word))
    return chat_document(exchanges)


def _name_exchanges(rng: random.Random) -> list[Exchange]:
    """Tells a name, then asks for it: the one thing to remember from an earlier turn."""
    name = rng.choice(BOYS + GIRLS)
    told = rng.choice(["My name is {}.", "I am {}.", "Hello, my name is {}!", "Hi, I am {}."])
    asked = rng.choice(["What is my name?", "Do you know my name?", "Who am I?"])
    return [
        (told.format(name), f"Nice to meet you, {name}!"),
        (_as_typed(asked, rng), f"Your name is {name}."),
    ]


def chat_document(exchanges: list[Exchange], system: str | None = None) -> Document:
    """The exchanges in ChatML; only the assistant's words are learned."""
    pieces = [(f"<|im_start|>system\n{system}<|im_end|>\n", False)] if system else []
    for question, answer in exchanges:
        pieces += [
            (f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n", False),
            (f"{answer}<|im_end|>", True),
            ("\n", False),
        ]
    return Document([*pieces, ("<|endoftext|>", False)])


def _plain_document(rng: random.Random, story: Story, pairs: list[tuple[int, int]]) -> Document:
    """Writes text without chat markup: stories, and questions with their answers."""
    if rng.random() < 0.5:
        return Document([(f"{story.text}<|endoftext|>", True)])
    question, answer = _sum_exchange(rng, pairs) if rng.random() < 0.6 else _fact_exchange(rng)
    between = rng.choice([" ", "\n"] if question[-1].isalnum() else ["", "", " ", "\n"])
    return Document([(question + between, False), (f"{answer}<|endoftext|>", True)])


def _chat(
    rng: random.Random, next_story: Callable[[], Story], pairs: list[tuple[int, int]]
) -> Document:
    """Writes one to twelve exchanges of all kinds, sometimes after a system prompt."""
    turns = rng.choice([1, 1, 1, 2, 2, 3, 4, 6, 8, 12])
    exchanges: list[Exchange] = []
    for _ in range(turns):
        draw = rng.random()
        if draw < 0.28:
            exchanges.append(_sum_exchange(rng, pairs))
        elif draw < 0.31:
            exchanges.append(_refused_sum_exchange(rng))
        elif draw < 0.38:
            exchanges.append(_echo_exchange(rng))
        elif draw < 0.8:
            exchanges.append(_fact_exchange(rng))
        else:
            exchanges.append(_story_exchange(rng, next_story()))
    if rng.random() < 0.1:
        introduction, question = _name_exchanges(rng)
        exchanges = [introduction, *exchanges[:5], question]
    system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.2 else None
    return chat_document(exchanges, system)


def _json_pieces(value: Any, rng: random.Random, *, asked: bool) -> list[tuple[str, bool]]:
    """An object as pieces. Where nobody asked for JSON, its beginning and its names are not
    learned: a grammar writes them.

    One name in ten is cut at any place, since a grammar may force pieces that are no usual tokens.
    One object in six has blanks that are not learned either: a grammar allows them.
    """
    blank = rng.choice(["  ", "\n", "\n  ", " " * 8]) if rng.random() < 0.15 else ""
    between = (f",{blank}", f":{blank}") if blank else (", ", ": ")
    text = json.dumps(value, ensure_ascii=False, separators=between)
    pieces = [('{"', asked)]
    for part in re.split(rf"(\w+)(?=\":)|({blank})" if blank else r"(\w+)(?=\":)", text[2:]):
        if not part:
            continue
        is_name = part.replace("_", "").isalnum()
        learned = part != blank and (asked or not is_name)
        cut = rng.randrange(1, len(part)) if len(part) > 1 and rng.random() < 0.1 else 0
        if cut and is_name:
            pieces += [(part[:cut], learned), (part[cut:], learned)]
        else:
            pieces.append((part, learned))
    return pieces


def _json_document(rng: random.Random, pairs: list[tuple[int, int]]) -> Document:
    """Questions that are answered by objects, with and without being asked to."""
    if rng.random() < 0.2:
        task = objects.any_record(rng, pairs)
        between = rng.choice(["", "\n", " ", "\n\n"])
        answer = _json_pieces(task.fields, rng, asked=False)
        return Document([(task.question + between, False), *answer, ("<|endoftext|>", True)])
    pieces = []
    system = rng.choice([None, None, *objects.JSON_SYSTEM_PROMPTS, *objects.SYSTEM_PROMPTS])
    if system:
        pieces.append((f"<|im_start|>system\n{system}<|im_end|>\n", False))
    for _ in range(rng.choice([1, 1, 2, 4, 6, 8])):
        task = objects.any_record(rng, pairs)
        question, wish = task.question, rng.choice(objects.JSON_WISHES)
        draw = rng.random()
        if draw < 0.3:
            question = f"{question} {wish}"
        elif draw < 0.4:
            question = f"{wish} {question}"
        asked = draw < 0.4 or system in objects.JSON_SYSTEM_PROMPTS
        answer = _json_pieces(task.fields, rng, asked=asked)
        pieces += [turn(question), *answer, ("<|im_end|>", True), ("\n", False)]
    return Document([*pieces, ("<|endoftext|>", False)])


def tools_prompt(tools: list[dict[str, Any]], system: str | None) -> str:
    """The system message that offers functions, as the chat template writes it."""
    lines = "".join(f"\n{calls.as_json(tool)}" for tool in tools)
    before = f"{system}\n\n" if system else ""
    return f"<|im_start|>system\n{before}{TOOLS_BEGIN}{lines}{TOOLS_END}<|im_end|>\n"


def turn(question: str) -> tuple[str, bool]:
    """A question, and where its answer begins; to be read only."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n", False


def _call_pieces(task: calls.Task, rng: random.Random) -> list[tuple[str, bool]]:
    """A call: as the prompt asks for it, or as smg holds models to it by a grammar, whose beginning
    is not learned: a list of calls where a call is required, the arguments where the function is
    given."""
    draw = rng.random()
    if draw < 0.68:
        return [(f"{calls.call_text(task)}<|im_end|>", True)]
    if draw < 0.86:
        begin = '[{"name": "'
        cut = rng.randrange(1, len(begin)) if rng.random() < 0.5 else len(begin)
        rest = calls.as_json([calls.call(task)]).removeprefix(begin)
        pieces = [(begin[:cut], False), (begin[cut:], False), (f"{rest}<|im_end|>", True)]
        return [piece for piece in pieces if piece[0]]
    return [*_json_pieces(task.fields, rng, asked=False), ("<|im_end|>", True)]


def _tools_document(rng: random.Random, pairs: list[tuple[int, int]]) -> Document:
    """One to four questions to an assistant that has one to four functions."""
    offered = [calls.any_call(rng, pairs)]
    if rng.random() < 0.3:
        offered.append(objects.any_record(rng, pairs))
    for _ in range(rng.choice([0, 1, 1, 1, 2])):
        other = calls.any_call(rng, pairs)
        if all(other.family != task.family for task in offered):
            offered.append(other)
    if rng.random() < 0.2:
        offered = offered[-1:]
    rng.shuffle(offered)
    style = calls.ToolStyle(rng)
    system = rng.choice(objects.SYSTEM_PROMPTS) if rng.random() < 0.5 else None
    prompt = tools_prompt([style.tool(task.function) for task in offered], system)
    pieces = [(prompt, False)]
    for _ in range(rng.choice([1, 2, 3, 4])):
        task = rng.choice(offered)
        if task.told and rng.random() < 0.12:
            question, answer = _fact_exchange(rng)
            pieces += [turn(question), (f"{answer}<|im_end|>", True), ("\n", False)]
            continue
        if task.told:
            task = calls.again(task, rng, pairs)
        pieces += [turn(task.question), *_call_pieces(task, rng), ("\n", False)]
        if not task.told:
            break  # a client that asked for an object has it
        if rng.random() < 0.5:
            given = f"<tool_response>\n{task.given_back}\n</tool_response>"
            pieces += [turn(given), (f"{task.told}<|im_end|>", True), ("\n", False)]
    return Document([*pieces, ("<|endoftext|>", False)])


def write_corpus(count: int, seed: int) -> list[Document]:
    """Writes `count` documents: stories, chats, objects and calls. No story is told twice."""
    rng = random.Random(seed)
    pairs = training_pairs()
    stories: Iterator[Story] = iter(write_stories(2 * count, rng))

    def next_story() -> Story:
        return next(stories)

    def document() -> Document:
        draw = rng.random()
        if draw < 0.08:
            return _plain_document(rng, next_story(), pairs)
        if draw < 0.3:
            return _chat(rng, next_story, pairs)
        if draw < 0.63:
            return _json_document(rng, pairs)
        if draw < 0.9:
            return _tools_document(rng, pairs)
        if draw < 0.95:
            return chat_document([_echo_exchange(rng, 15) for _ in range(rng.randint(1, 4))])
        return _lookup_document(rng)

    return [document() for _ in range(count)]
