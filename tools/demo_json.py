"""Questions that are answered in JSON: as an object, or as a call of a function in the prompt.

A task is a question with the fields that answer it. Asked for JSON, the model writes the fields;
where a system prompt offers a function with these fields as parameters, it calls that. Of the
names of fields and functions, many are made up, so that the model reads them instead of guessing.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from tools.demo_facts import CAPITALS, FACTS, HELLO_IN, OPPOSITES
from tools.demo_stories import ANIMALS, BOYS, GIRLS, words

Pairs = list[tuple[int, int]]

# Names that no training text has, for measuring.
UNSEEN_KEYS = ["outcome", "amount", "reply", "calculated", "my_number", "theSum"]
UNSEEN_FUNCTIONS = {
    "sum": ["combine_values", "tally"],
    "weather": ["forecast_for", "lookup_sky"],
    "capital": ["seat_of_government", "main_city"],
    "timer": ["ring_after", "remind_me"],
}
UNSEEN_PARAMETERS = {
    "sum": ["p", "q"],
    "weather": ["town"],
    "capital": ["nation"],
    "timer": ["duration"],
}

UNSEEN = {
    *UNSEEN_KEYS,
    *(
        name
        for names in (UNSEEN_FUNCTIONS, UNSEEN_PARAMETERS)
        for each in names.values()
        for name in each
    ),
}

TOTAL_KEYS = words("""answer result sum total value number output solution final_answer res
answer_value sum_value x n computed final""")
ANSWER_KEYS = words("answer text response content message output explanation")
WORKING_KEYS = words("explanation reasoning steps thought working rationale thinking")
OPERANDS = [("a", "b"), ("x", "y"), ("first", "second"), ("left", "right"), ("num1", "num2")]
WORDS = words("""apple river stone cloud music happy green seven market window garden letter silver
orange paper winter summer coffee bread ship mountain story number color place owner level score
item label title date kind size price count index group input state note code key entry field
house street bridge forest animal dream light water fire table chair school friend""")
CITIES = words("""Paris Berlin Rome Madrid Lisbon Vienna Athens Warsaw Oslo Stockholm Tokyo Beijing
Cairo Ottawa Lima London Dublin Prague Zurich Boston Chicago Bern Milan Munich Sydney""")
CITIES += ["New York", "San Francisco", "New Delhi", "Hong Kong", "Los Angeles"]
COUNTRIES = [*CAPITALS, "Brazil", "Mexico", "Kenya", "Ireland", "Chile", "Vietnam", "South Korea"]
PEOPLE = [*BOYS, *GIRLS, "Alice", "Bob", "Jason", "John", "Sarah", "Peter", "Maria", "David"]
PRODUCTS = words("book lamp bicycle phone pen bag shirt camera clock guitar")
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
EVENTS = ["science fair", "concert", "birthday party", "meeting", "dinner", "workshop", "wedding"]
LIKED = "I love this. | This is great! | What a wonderful day. | It works very well. | I am happy."
HATED = "I hate this. | This is bad. | What a terrible day. | It does not work. | I am sad."
TEXT_WORDS = sorted(
    {
        word.lower()
        for file in ("demo_json.py", "demo_facts.py", "demo_stories.py")
        for word in re.findall("[a-zA-Z]+", Path(__file__).with_name(file).read_text())
    }
    - UNSEEN
)
WEATHER = ["sunny", "rainy", "cloudy", "windy", "snow", "fog", "clear", "warm", "cold"]

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


@dataclass(frozen=True)
class Function:
    """A function as a prompt describes it; each parameter has a JSON type and a description."""

    name: str
    description: str
    parameters: dict[str, tuple[str, str]]


@dataclass(frozen=True)
class Task:
    """A question, the fields of its answer, and the function that takes these fields.

    `given_back` is what the function returns and `told` what to say then.
    """

    family: str
    question: str
    fields: dict[str, Any]
    function: Function
    given_back: str = ""
    told: str = ""


def made_up(rng: random.Random) -> str:
    """A word that means nothing, so that a model learns to copy any text: of syllables, of pieces
    of words, or of letters."""
    draw = rng.random()
    if draw < 0.4:
        word = "".join(
            rng.choice("bcdfghjklmnprstvwz")
            + rng.choice(["a", "e", "i", "o", "u", "ai", "or", "en"])
            for _ in range(rng.randint(1, 3))
        ) + rng.choice(["", "", "n", "s", "t", "l"])
    elif draw < 0.85:
        word = "".join(_piece(rng) for _ in range(rng.randint(1, 3)))
    else:
        word = "".join(rng.choice(ascii_lowercase) for _ in range(rng.choice([1, 1, 2, 3, 4])))
    return made_up(rng) if word in UNSEEN else word


def _piece(rng: random.Random) -> str:
    word: str = rng.choice(TEXT_WORDS)
    start = rng.choice([0, 0, rng.randrange(len(word))])
    end = len(word) if rng.random() < 0.4 else start + rng.randint(1, 7)
    return word[start:end]


def _any_name(rng: random.Random) -> str:
    """A name that says nothing about what it is for, of one or two words."""
    parts = [
        rng.choice(WORDS) if rng.random() < 0.5 else made_up(rng)
        for _ in range(rng.choice([1, 1, 2]))
    ]
    if rng.random() < 0.25:
        return parts[0] + "".join(part.capitalize() for part in parts[1:])
    return "_".join(parts)


def _name(rng: random.Random, usual: list[str], share: float = 0.6) -> str:
    """One of the usual names, or a `share` of times any."""
    return _any_name(rng) if rng.random() < share else rng.choice(usual)


def _city(rng: random.Random) -> str:
    return rng.choice(CITIES) if rng.random() < 0.5 else made_up(rng).capitalize()


def _country(rng: random.Random) -> str:
    return rng.choice(COUNTRIES) if rng.random() < 0.5 else made_up(rng).capitalize()


def _person(rng: random.Random) -> str:
    return rng.choice(PEOPLE) if rng.random() < 0.5 else made_up(rng).capitalize()


def _function(
    rng: random.Random,
    names: str,
    descriptions: str,
    parameters: dict[str, tuple[str, str]],
) -> Function:
    """A function with one of the names, or more than half of the times with any."""
    return Function(_name(rng, names.split()), rng.choice(descriptions.split(" | ")), parameters)


def _sum(rng: random.Random, pairs: Pairs) -> Task:
    a, b = rng.choice(pairs)
    asked = rng.choice(
        [
            "What is {a} + {b}?",
            "What is {a} plus {b}?",
            "{a} + {b}",
            "{a}+{b}",
            "Add {a} and {b}.",
            "How much is {a} + {b}?",
            "What is the sum of {a} and {b}?",
            "Calculate {a} + {b}.",
            "Please add {a} and {b}.",
        ]
    ).format(a=a, b=b)
    first, second = rng.choice(OPERANDS)
    draw = rng.random()
    if draw < 0.3:
        first, second = _any_name(rng), f"{_any_name(rng)}_2"
    elif draw < 0.5:
        first = _any_name(rng)
        first, second = f"{first}_1", f"{first}_2"
    function = _function(
        rng,
        "add add_numbers sum plus addition calculate_sum get_sum",
        "Add two numbers. | Adds a and b. | Returns the sum of two numbers. | Addition."
        " | Calculates the sum of two integers. | Add two integers",
        {first: ("integer", "The first number."), second: ("integer", "The second number.")},
    )
    return Task("sum", asked, {first: a, second: b}, function, str(a + b), f"{a} + {b} = {a + b}.")


def _product(rng: random.Random, _: Pairs) -> Task:
    a, b = rng.randint(2, 99), rng.randint(2, 99)
    asked = rng.choice(["What is {a} * {b}?", "What is {a} times {b}?", "Multiply {a} and {b}."])
    first, second = rng.choice(OPERANDS)
    function = _function(
        rng,
        "multiply times product multiply_numbers",
        "Multiply two numbers. | Multiplies a and b. | Returns the product of two numbers.",
        {first: ("integer", "The first number."), second: ("integer", "The second number.")},
    )
    return Task(
        "product",
        asked.format(a=a, b=b),
        {first: a, second: b},
        function,
        str(a * b),
        f"{a} * {b} = {a * b}.",
    )


def _weather(rng: random.Random, _: Pairs) -> Task:
    city, weather = _city(rng), rng.choice(WEATHER)
    if rng.random() < 0.4:
        weather += f", {rng.randint(-9, 39)} degrees"
    asked = rng.choice(
        [
            "What is the weather in {}?",
            "What's the weather like in {}?",
            "How is the weather in {} today?",
            "Weather in {}",
            "Is it raining in {}?",
            "Tell me the weather in {}.",
            "Will it be sunny in {}?",
        ]
    ).format(city)
    place = _name(rng, ["city", "city", "location", "place"])
    function = _function(
        rng,
        "get_weather weather get_current_weather weather_in forecast",
        "Get the weather. | Get the current weather in a given city. | The weather of a city."
        " | Returns the weather for a location. | Get weather for a city",
        {place: ("string", "The city.")},
    )
    return Task(
        "weather", asked, {place: city}, function, weather, f"The weather in {city}: {weather}."
    )


def _capital(rng: random.Random, _: Pairs) -> Task:
    country = _country(rng)
    capital = CAPITALS.get(country) or made_up(rng).capitalize()
    asked = rng.choice(
        [
            "What is the capital of {}?",
            "Capital of {}?",
            "Name the capital of {}.",
            "Which city is the capital of {}?",
        ]
    ).format(country)
    parameter = _name(rng, ["country", "country", "name", "land"])
    function = _function(
        rng,
        "get_capital capital capital_of find_capital",
        "Get the capital of a country. | Returns a country's capital. | The capital of a country."
        " | Finds the capital city.",
        {parameter: ("string", "The country.")},
    )
    told = f"The capital of {country} is {capital}."
    return Task("capital", asked, {parameter: country}, function, capital, told)


def _story(rng: random.Random, _: Pairs) -> Task:
    animal = rng.choice(ANIMALS)
    asked = rng.choice(
        ["Tell me a story about a {}.", "Write a story about a {}.", "A story about a {}, please."]
    ).format(animal)
    parameter = _name(rng, ["animal", "topic", "about", "subject"])
    function = _function(
        rng,
        "tell_story write_story story make_story",
        "Tell a story. | Writes a story about an animal. | Tells a story about a topic.",
        {parameter: ("string", "The animal.")},
    )
    return Task("story", asked, {parameter: animal}, function, "done", "Done.")


def _time(rng: random.Random, _: Pairs) -> Task:
    city, time = _city(rng), f"{rng.randint(0, 23)}:{rng.randint(10, 59)}"
    asked = rng.choice(["What time is it in {}?", "Time in {}?", "Tell me the time in {}."])
    parameter = _name(rng, ["city", "timezone", "place"])
    function = _function(
        rng,
        "get_time time current_time get_current_time clock",
        "Get the current time. | Returns the time in a city. | The time of a place.",
        {parameter: ("string", "The city.")},
    )
    told = f"It is {time} in {city}."
    return Task("time", asked.format(city), {parameter: city}, function, time, told)


def _translation(rng: random.Random, _: Pairs) -> Task:
    word = rng.choice([*WORDS, *OPPOSITES, "hello"]) if rng.random() < 0.5 else made_up(rng)
    language, foreign = rng.choice(list(HELLO_IN)), made_up(rng)
    asked = rng.choice(
        ["Translate {} into {}.", "What is {} in {}?", "How do you say {} in {}?"]
    ).format(word, language)
    function = _function(
        rng,
        "translate translation translate_text",
        "Translate a text. | Translates a word into a language. | Translation.",
        {"text": ("string", "The text."), "language": ("string", "The language.")},
    )
    told = f"In {language}: {foreign}."
    fields = {"text": word, "language": language}
    return Task("translation", asked, fields, function, foreign, told)


def _search(rng: random.Random, _: Pairs) -> Task:
    query = " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 3)))
    asked = rng.choice(["Search for {}.", "Find {}.", "Look up {}.", "Search the web for {}."])
    parameter = _name(rng, ["query", "q", "search", "text"])
    function = _function(
        rng,
        "search web_search find lookup search_web",
        "Search the web. | Searches for a text. | Look something up. | Web search",
        {parameter: ("string", "What to search for.")},
    )
    found = f"{rng.randint(1, 9)} pages"
    told = f"I found {found}."
    return Task("search", asked.format(query), {parameter: query}, function, found, told)


def _message(rng: random.Random, _: Pairs) -> Task:
    person, text = _person(rng), rng.choice(["hello", "good morning", "I am late", "thank you"])
    if rng.random() < 0.4:
        text = " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 3)))
    asked = rng.choice(["Send a message to {}: {}", "Tell {}: {}", "Write to {}: {}"])
    to = rng.choice(["to", "recipient", "person"])
    function = _function(
        rng,
        "send_message message send_email notify",
        "Send a message. | Sends a text to a person. | Writes a message to someone.",
        {to: ("string", "The person."), "text": ("string", "The message.")},
    )
    fields = {to: person, "text": text}
    return Task("message", asked.format(person, text), fields, function, "sent", "Done.")


def _timer(rng: random.Random, _: Pairs) -> Task:
    minutes = rng.randint(1, 99)
    asked = rng.choice(
        ["Set a timer for {} minutes.", "Wake me in {} minutes.", "Timer, {} minutes, please."]
    ).format(minutes)
    parameter = _name(rng, ["minutes", "minutes", "time", "length"])
    function = _function(
        rng,
        "set_timer timer start_timer alarm",
        "Set a timer. | Starts a timer. | Rings after some minutes.",
        {parameter: ("integer", "The minutes.")},
    )
    return Task("timer", asked, {parameter: minutes}, function, "ok", "Done.")


def _dice(rng: random.Random, _: Pairs) -> Task:
    rolled = str(rng.randint(1, 6))
    asked = rng.choice(
        ["Roll a die.", "Roll the dice.", "Throw a die.", "A random number, please."]
    )
    function = _function(
        rng,
        "roll_dice roll_die dice random_number",
        "Roll a die. | Roll a six-sided die and return the result. | Returns a random number.",
        {},
    )
    return Task("dice", asked, {}, function, rolled, f"The number is {rolled}.")


CALLS: list[Callable[[random.Random, Pairs], Task]] = [
    _sum,
    _product,
    _weather,
    _capital,
    _story,
    _time,
    _translation,
    _search,
    _message,
    _timer,
    _dice,
]

CALLS_MEASURED = {"sum": _sum, "weather": _weather, "capital": _capital, "timer": _timer}


def _record(
    rng: random.Random, family: str, question: str, fields: dict[str, Any], *, final: bool = False
) -> Task:
    """A task whose function takes the answer itself, as clients ask for that want an object."""
    name = rng.choice(FINAL_NAMES) if final or rng.random() < 0.5 else _any_name(rng).capitalize()
    description = rng.choice(FINAL_TEXTS).format(name=name)
    parameters = {key: (_type(value), "") for key, value in fields.items()}
    return Task(family, question, fields, Function(name, description, parameters))


def _type(value: Any) -> str:
    types = {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}
    return types.get(type(value), "null")


def sum_answer(a: int, b: int) -> str:
    """Adds the ones first, then the rest: with the carry in sight, sums are learned far faster.

    >>> sum_answer(17, 25)
    '7 + 5 = 12, so 17 + 25 = 42.'
    """
    total = f"{a} + {b} = {a + b}."
    if a < 10 and b < 10:
        return total
    return f"{a % 10} + {b % 10} = {a % 10 + b % 10}, so {total}"


def _composed_sum(rng: random.Random, a: int, b: int, asked: str) -> dict[str, Any]:
    """A sum in a form, and under names, that nothing but the form itself tells. Of the forms in
    UNSEEN_SHAPES this makes none."""
    texts = [asked, "addition", sum_answer(a, b), f"{a} + {b}"]

    def name() -> str:
        return _name(rng, [*TOTAL_KEYS, *ANSWER_KEYS, *WORKING_KEYS, "data", "results"], 0.5)

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
    others: list[Callable[[], dict[str, Any]]] = rng.sample(
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
    parts: list[dict[str, Any]] = [{name(): total}, *(other() for other in others)]
    rng.shuffle(parts)
    kinds = [type(next(iter(part.values()))) for part in parts]
    if kinds == [str, list, int]:
        parts.reverse()
    return {key: each for part in parts for key, each in part.items()}


def sum_record(rng: random.Random, pairs: Pairs, shape: str = "", key: str = "") -> Task:
    """A sum whose answer is an object of the `shape`, or of any, with the sum at `key`, or any."""
    a, b = rng.choice(pairs)
    asked = _sum(rng, [(a, b)]).question
    if not shape and rng.random() < 0.5:
        return _record(rng, "sum", asked, _composed_sum(rng, a, b, asked), final=True)
    shape = shape or rng.choice(SEEN_SHAPES + ["sum"] * 4)
    key = key or _name(rng, TOTAL_KEYS, 0.4)
    ones = f"{a % 10} + {b % 10} = {a % 10 + b % 10}"
    whole = f"{a} + {b} = {a + b}"
    first, second = rng.choice(OPERANDS)
    total: dict[str, Any] = {key: a + b}
    explained = {rng.choice(WORKING_KEYS): sum_answer(a, b)}
    shapes: dict[str, dict[str, Any]] = {
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
    key = _name(rng, ANSWER_KEYS, 0.2)
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
    person, age = _person(rng), rng.randint(1, 99)
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
    fields: dict[str, Any] = {rng.choice(["name", "name", "person", "user"]): person, "age": age}
    if rng.random() < 0.3:
        city = _city(rng)
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
    fields: dict[str, Any] = {
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
    name, animal = _person(rng), rng.choice(ANIMALS)
    asked = rng.choice(["Tell me a story about {} the {}.", "{} is a {}.", "There is {}, a {}."])
    fields: dict[str, Any] = {"name": name, "animal": animal}
    if rng.random() < 0.3:
        fields = {"title": f"{name} the {animal}", **fields}
    return _record(rng, "animal", asked.format(name, animal), fields)


def _nobody_record(rng: random.Random) -> Task:
    """Fields that the question says nothing of."""
    asked = rng.choice(["Once upon a time", "Hello!", "A person.", "Make up a person.", "Who?"])
    fields: dict[str, Any] = {"name": rng.choice(PEOPLE), "age": rng.randint(3, 60)}
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


def any_call(rng: random.Random, pairs: Pairs) -> Task:
    return rng.choice([_sum, _weather, *CALLS])(rng, pairs)


def again(task: Task, rng: random.Random, pairs: Pairs) -> Task:
    """Another question that the task's function answers."""
    other = next(other for make in CALLS if (other := make(rng, pairs)).family == task.family)
    fields = dict(zip(task.fields, other.fields.values(), strict=True))
    return replace(other, fields=fields, function=task.function)


def unseen(task: Task, rng: random.Random) -> Task:
    """The task with names of functions and parameters that no training text has."""
    new_names = UNSEEN_PARAMETERS[task.family]
    names = dict(zip(task.fields, new_names, strict=True))
    parameters = {names[key]: value for key, value in task.function.parameters.items()}
    name = rng.choice(UNSEEN_FUNCTIONS[task.family])
    return replace(
        task,
        fields={names[key]: value for key, value in task.fields.items()},
        function=replace(task.function, name=name, parameters=parameters),
    )


@dataclass
class ToolStyle:
    """How a client describes its functions; drawn anew for each prompt."""

    rng: random.Random
    described: bool = field(init=False)
    titled: bool = field(init=False)
    closed: bool = field(init=False)
    strict: bool = field(init=False)
    order: list[str] = field(init=False)

    def __post_init__(self) -> None:
        rng = self.rng
        self.described, self.titled = rng.random() < 0.5, rng.random() < 0.2
        self.closed, self.strict = rng.random() < 0.4, rng.random() < 0.2
        self.order = rng.sample(["type", "properties", "required"], 3)

    def tool(self, function: Function) -> dict[str, Any]:
        """The function as OpenAI's API describes it."""
        properties = {}
        for name, (kind, description) in function.parameters.items():
            about: dict[str, Any] = {"title": name.capitalize()} if self.titled else {}
            about["type"] = kind
            if self.described and description:
                about["description"] = description
            properties[name] = about
        parts: dict[str, Any] = {
            "type": "object",
            "properties": properties,
            "required": list(function.parameters),
        }
        schema = {name: parts[name] for name in self.order}
        if self.closed:
            schema["additionalProperties"] = False
        described: dict[str, Any] = {"name": function.name}
        if function.description:
            described["description"] = function.description
        described["parameters"] = schema
        if self.strict:
            described["strict"] = True
        return {"type": "function", "function": described}


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def call_text(task: Task) -> str:
    """The call as Qwen's models write it."""
    call = as_json({"name": task.function.name, "arguments": task.fields})
    return f"<tool_call>\n{call}\n</tool_call>"


def required_call(tools: list[dict[str, Any]]) -> dict[str, Any]:
    """The JSON schema to which the gateway, smg, holds a model that has to call a function."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "enum": [tool["function"]["name"]]},
                "parameters": tool["function"]["parameters"],
            },
            "required": ["name", "parameters"],
        }
        for tool in tools
    ]
    return {"type": "array", "minItems": 1, "items": {"anyOf": calls}}


def schema_of(value: Any) -> dict[str, Any]:
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
    return {"type": _type(value)}
