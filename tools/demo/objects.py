"""Questions that are answered by JSON objects, whose fields a schema names."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tools.demo.calls import SUM, Function, Pairs, Task, Values, json_type
from tools.demo.facts import CAPITALS, FACTS
from tools.demo.names import (
    OPERANDS,
    PEOPLE,
    any_city,
    any_name,
    any_or_usual,
    any_person,
)
from tools.demo.stories import ANIMALS, words

TOTAL_KEYS = words("""answer result sum total value number output solution final_answer res
answer_value sum_value x n computed final""")
ANSWER_KEYS = words("answer text response content message output explanation")
WORKING_KEYS = words("explanation reasoning steps thought working rationale thinking")
PRODUCTS = words("book lamp bicycle phone pen bag shirt camera clock guitar")
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
EVENTS = ["science fair", "concert", "birthday party", "meeting", "dinner", "workshop", "wedding"]
LIKED = "I love this. | This is great! | What a wonderful day. | It works very well. | I am happy."
HATED = "I hate this. | This is bad. | What a terrible day. | It does not work. | I am sad."

JSON_WISHES = [
    "Answer in JSON.",
    "Reply in JSON.",
    "Return JSON.",
    "Answer as JSON.",
    "Give the answer as a JSON object.",
    "Respond with JSON only.",
    "Use JSON.",
]
JSON_SYSTEM_PROMPTS = [
    "Answer in JSON.",
    "You are a helpful assistant that answers in JSON.",
    "You output JSON.",
    "Respond only with a JSON object.",
]
SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "You are a friendly assistant. Answer briefly.",
    "Use the tools.",
    "You are a helpful assistant. Use the functions you have.",
    "Extract the information.",
    "Be concise.",
]
FINAL_NAMES = ["final_result", "Answer", "Response", "Result", "respond", "output", "final_answer"]
FINAL_TEXTS = [
    "The final response which ends this conversation",
    "Correctly extracted `{name}` with all the required parameters with correct types",
    "The answer.",
    "",
]


def _record(
    rng: random.Random, family: str, question: str, fields: Values, *, final: bool = False
) -> Task:
    """A task whose function takes the answer itself, as clients ask for that want an object."""
    name = rng.choice(FINAL_NAMES) if final or rng.random() < 0.5 else any_name(rng).capitalize()
    description = rng.choice(FINAL_TEXTS).format(name=name)
    parameters = {key: (json_type(value), "") for key, value in fields.items()}
    return Task(family, question, fields, Function(name, description, parameters))


def sum_answer(a: int, b: int) -> str:
    """Adds the ones first, then the rest: with the carry in sight, sums are learned far faster.

    >>> sum_answer(17, 25)
    '7 + 5 = 12, so 17 + 25 = 42.'
    """
    total = f"{a} + {b} = {a + b}."
    if a < 10 and b < 10:
        return total
    return f"{a % 10} + {b % 10} = {a % 10 + b % 10}, so {total}"


def _composed_sum(rng: random.Random, a: int, b: int, asked: str) -> Values:
    """A sum in a form, and under names, that nothing but the form itself tells. Of the forms in
    UNSEEN_SHAPES this makes none."""
    texts = [asked, "addition", sum_answer(a, b), f"{a} + {b}"]

    def name() -> str:
        return any_or_usual(rng, [*TOTAL_KEYS, *ANSWER_KEYS, *WORKING_KEYS, "data", "results"], 0.5)

    quoted = rng.random() < 0.35

    def value(number: int) -> Any:
        return str(number) if quoted else number

    def text() -> str:
        return rng.choice(texts)

    total: Any = value(a + b)
    draw = rng.random()
    if draw < 0.12:
        total = [total]
    elif draw < 0.24:
        total = {name(): total}
    elif draw < 0.36:
        total = [{name(): total, name(): rng.choice([True, text()])}]
    elif draw < 0.42:
        total = {name(): [total]}
    others: list[Callable[[], Values]] = rng.sample(
        [
            lambda: {name(): [value(a), value(b)]},
            lambda: {name(): value(a), name(): value(b)},
            lambda: {name(): {name(): "addition", name(): value(a), name(): value(b)}},
            lambda: {name(): text()},
            lambda: {name(): [text(), text()]},
            lambda: {name(): True},
        ],
        rng.choice([0, 0, 0, 1, 1, 2]),
    )
    parts: list[Values] = [{name(): total}, *(other() for other in others)]
    rng.shuffle(parts)
    kinds = [type(next(iter(part.values()))) for part in parts]
    if kinds == [str, list, int]:
        parts.reverse()
    return {key: each for part in parts for key, each in part.items()}


def sum_record(rng: random.Random, pairs: Pairs, shape: str = "", key: str = "") -> Task:
    """A sum whose answer is an object of the `shape`, or of any, with the sum at `key`, or any."""
    a, b = rng.choice(pairs)
    asked = SUM.task(rng, [(a, b)]).question
    if not shape and rng.random() < 0.5:
        return _record(rng, "sum", asked, _composed_sum(rng, a, b, asked), final=True)
    shape = shape or rng.choice(SEEN_SHAPES + ["sum"] * 4)
    key = key or any_or_usual(rng, TOTAL_KEYS, 0.4)
    ones = f"{a % 10} + {b % 10} = {a % 10 + b % 10}"
    whole = f"{a} + {b} = {a + b}"
    first, second = rng.choice(OPERANDS)
    total: Values = {key: a + b}
    explained = {rng.choice(WORKING_KEYS): sum_answer(a, b)}
    shapes: dict[str, Values] = {
        "sum": total,
        "sum as text": {key: str(a + b)},
        "operands, sum": {first: a, second: b, **total},
        "sum, operands": {**total, first: a, second: b},
        "list, sum": {"numbers": [a, b], **total},
        "sum, working": {**total, **explained},
        "working, sum": {**explained, **total},
        "nested": {rng.choice(["result", "data", "math", "response"]): total},
        "operation": {"operation": "addition", first: a, second: b, **total},
        "question, sum": {"question": asked, **total},
        "steps": {"steps": [ones, whole], **total},
        "math reasoning": {
            "steps": [
                {"explanation": "Add the ones.", "output": ones},
                {"explanation": "Add the rest.", "output": whole},
            ],
            "final_answer": str(a + b),
        },
        "sum, correct": {**total, "correct": True},
        # Not in the training text:
        "list of one": {"results": [total]},
        "operands in an object, sum": {"operands": {first: a, second: b}, **total},
        "operation, list, sum": {"operation": "addition", "numbers": [a, b], **total},
    }
    return _record(rng, "sum", asked, shapes[shape], final=True)


SEEN_SHAPES = [
    "sum",
    "sum as text",
    "operands, sum",
    "sum, operands",
    "list, sum",
    "sum, working",
    "working, sum",
    "nested",
    "operation",
    "question, sum",
    "steps",
    "math reasoning",
    "sum, correct",
]
UNSEEN_SHAPES = ["list of one", "operands in an object, sum", "operation, list, sum"]


def _fact_record(rng: random.Random) -> Task:
    questions, answer = rng.choice(FACTS)
    key = any_or_usual(rng, ANSWER_KEYS, 0.2)
    return _record(rng, "fact", rng.choice(questions), {key: answer}, final=True)


def _capital_record(rng: random.Random) -> Task:
    country, capital = rng.choice(list(CAPITALS.items()))
    asked = rng.choice(
        ["What is the capital of {}?", "Capital of {}?", "Name the capital of {}."]
    ).format(country)
    fields = {rng.choice(["capital", "city"]): capital, "country": country}
    if rng.random() < 0.4:
        fields = dict(reversed(fields.items()))
    if rng.random() < 0.3:
        del fields["country"]
    return _record(rng, "capital", asked, fields)


def _person_record(rng: random.Random) -> Task:
    person, age = any_person(rng), rng.randint(1, 99)
    asked = rng.choice(
        [
            "{} is {} years old.",
            "Extract: {} is {} years old.",
            "Extract {} is {} years old.",
            "My name is {} and I am {} years old.",
            "I am {}, {} years old.",
            "This is {}, aged {}.",
        ]
    ).format(person, age)
    fields: Values = {rng.choice(["name", "name", "person", "user"]): person, "age": age}
    if rng.random() < 0.3:
        city = any_city(rng)
        asked = f"{asked.rstrip('.')} and lives in {city}."
        fields["city"] = city
    return _record(rng, "person", asked, fields)


def _event_record(rng: random.Random) -> Task:
    first, second = rng.sample(PEOPLE, 2)
    event, day = rng.choice(EVENTS), rng.choice(DAYS)
    asked = rng.choice(
        [
            "{} and {} are going to a {} on {}.",
            "{} and {} have a {} on {}.",
            "{} and {} meet for a {} on {}.",
        ]
    ).format(first, second, event, day)
    fields = {"name": event.capitalize(), "date": day, "participants": [first, second]}
    return _record(rng, "event", asked, fields)


def _sentiment_record(rng: random.Random) -> Task:
    liked = rng.random() < 0.5
    text = rng.choice((LIKED if liked else HATED).split(" | "))
    asked = rng.choice(["{}", "Classify: {}", "What is the sentiment? {}"]).format(text)
    key = rng.choice(["sentiment", "label", "category", "class"])
    return _record(rng, "sentiment", asked, {key: "positive" if liked else "negative"})


def _joke_record(rng: random.Random) -> Task:
    asked = f"Tell me a joke{rng.choice([' about a duck', ' about cats', '', ''])}."
    fields: Values = {
        "setup": "Why did the duck cross the road?",
        "punchline": "To show the fox that it could be done.",
    }
    if rng.random() < 0.5:
        fields["rating"] = rng.choice([7, 8])
    return _record(rng, "joke", asked, fields)


def _product_record(rng: random.Random) -> Task:
    item, price = rng.choice(PRODUCTS), rng.randint(1, 99)
    asked = rng.choice(["The {} costs {} dollars.", "A {} for {} dollars.", "{}: {} dollars"])
    fields = {rng.choice(["name", "product", "item"]): item, "price": price}
    return _record(rng, "price", asked.format(item, price), fields)


def _animal_record(rng: random.Random) -> Task:
    name, animal = any_person(rng), rng.choice(ANIMALS)
    asked = rng.choice(["Tell me a story about {} the {}.", "{} is a {}.", "There is {}, a {}."])
    fields: Values = {"name": name, "animal": animal}
    if rng.random() < 0.3:
        fields = {"title": f"{name} the {animal}", **fields}
    return _record(rng, "animal", asked.format(name, animal), fields)


def _nobody_record(rng: random.Random) -> Task:
    """Fields that the question says nothing of."""
    asked = rng.choice(["Once upon a time", "Hello!", "A person.", "Make up a person.", "Who?"])
    fields: Values = {"name": rng.choice(PEOPLE), "age": rng.randint(3, 60)}
    return _record(rng, "person", asked, fields)


RECORDS: list[Callable[[random.Random], Task]] = [
    _fact_record,
    _capital_record,
    _person_record,
    _event_record,
    _sentiment_record,
    _joke_record,
    _product_record,
    _animal_record,
    _nobody_record,
]


def any_record(rng: random.Random, pairs: Pairs) -> Task:
    """More than half of them are sums."""
    return sum_record(rng, pairs) if rng.random() < 0.6 else rng.choice(RECORDS)(rng)


def schema_of(value: Any) -> Values:
    """The JSON schema of an answer, as a client would write it."""
    if isinstance(value, dict):
        properties = {key: schema_of(each) for key, each in value.items()}
        return {
            "type": "object",
            "properties": properties,
            "required": list(value),
            "additionalProperties": False,
        }
    if isinstance(value, list):
        return {"type": "array", "items": schema_of(value[0])}
    return {"type": json_type(value)}
