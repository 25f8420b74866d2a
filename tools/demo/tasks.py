"""Questions that are answered by JSON: by an object whose names a schema gives, or by the call of a
function that the prompt offers.

Many names are made up, so that the model copies them from the prompt instead of guessing.
"""

import json
import random
from dataclasses import dataclass, replace
from string import ascii_lowercase
from typing import Any

from tools.demo.facts import CAPITAL_QUESTIONS, CAPITALS
from tools.demo.stories import phrases, words

Values = dict[str, Any]
Pairs = list[tuple[int, int]]

WORDS = words("""apple river stone cloud music happy green market window garden letter paper
coffee bread ship story number color place owner level score item label title date kind size price
count index group input state note code key entry field house street animal light water""")
CITIES = phrases("""Paris | Berlin | Rome | Madrid | Lisbon | Vienna | Athens | Oslo | Tokyo | Cairo
    | Lima | London | Dublin | Boston | Chicago | Bern | Milan | New York | San Francisco""")
TOTAL_KEYS = words("""answer result sum total value number output solution final_answer res
answer_value sum_value x n computed final""")
OPERANDS = [("a", "b"), ("x", "y"), ("first", "second"), ("left", "right"), ("num1", "num2")]
JSON_WISHES = phrases("""Answer in JSON. | Reply in JSON. | Return JSON. | Answer as JSON.
    | Give the answer as a JSON object. | Respond with JSON only. | Use JSON.""")
SUM_QUESTIONS = phrases("""What is {a} + {b}? | What is {a} plus {b}? | {a} + {b} | {a}+{b}
    | {a} + {b} = | {a}+{b}=? | Add {a} and {b}. | How much is {a} + {b}? | Can you add {a} and {b}?
    | What is the sum of {a} and {b}? | Calculate {a} + {b}. | What's {a}+{b}? | And {a} + {b}?""")

SEEN_SHAPES = ["sum", "sum as text", "operands, sum", "list, sum", "sum, working", "nested"]
# Shapes and names that no training text has, for measuring.
UNSEEN_SHAPES = ["list of one", "operands in an object, sum", "operation, list, sum"]
UNSEEN_KEYS = ["outcome", "amount", "reply", "calculated", "my_number", "theSum"]
UNSEEN_FUNCTIONS = {  # with the names of their parameters
    "sum": ("combine_values", ["p", "q"]),
    "weather": ("forecast_for", ["town"]),
    "capital": ("seat_of_government", ["nation"]),
    "timer": ("ring_after", ["duration"]),
}


@dataclass(frozen=True)
class Task:
    """A question, the fields of its answer, and the function that takes these fields.

    `given_back` is what the function returns and `told` what to say then.
    """

    family: str
    question: str
    fields: Values
    function: str = ""
    description: str = ""
    given_back: str = ""
    told: str = ""

    @property
    def tool(self) -> Values:
        """The function as OpenAI's API describes it."""
        about = {"name": self.function, "description": self.description}
        return {"type": "function", "function": {**about, "parameters": schema_of(self.fields)}}

    @property
    def call_text(self) -> str:
        """The call as Qwen's models write it."""
        written = as_json({"name": self.function, "arguments": self.fields})
        return f"<tool_call>\n{written}\n</tool_call>"

    @property
    def required_call(self) -> Values:
        """The call as a server may have a model write it that must call a function."""
        return {"name": self.function, "parameters": self.fields}


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def schema_of(value: Any) -> Values:
    """The JSON schema of a value, as a client would write it."""
    if isinstance(value, dict):
        properties = {key: schema_of(each) for key, each in value.items()}
        return {"type": "object", "properties": properties, "required": list(value)}
    if isinstance(value, list):
        return {"type": "array", "items": schema_of(value[0])}
    return {"type": {int: "integer", str: "string"}[type(value)]}


def schema_of_calls(tasks: list[Task]) -> Values:
    """A JSON schema for a model that must call one of the functions."""
    calls = [schema_of(task.required_call) for task in tasks]
    for call, task in zip(calls, tasks, strict=True):
        call["properties"]["name"]["enum"] = [task.function]
    return {"type": "array", "minItems": 1, "items": {"anyOf": calls}}


def made_up(rng: random.Random) -> str:
    """A word that means nothing: of syllables, of pieces of words, or of letters."""
    draw = rng.random()
    if draw < 0.4:
        vowels = ["a", "e", "i", "o", "u", "ai", "or", "en"]
        count = rng.randint(1, 3)
        return "".join(rng.choice("bcdfghjklmnprstvwz") + rng.choice(vowels) for _ in range(count))
    if draw < 0.85:
        return "".join(rng.choice(WORDS)[-rng.randint(2, 7) :] for _ in range(rng.randint(1, 2)))
    return "".join(rng.choices(ascii_lowercase, k=rng.choice([1, 2, 3, 4])))


def any_of(rng: random.Random, usual: list[str]) -> str:
    """One of the usual names, or in half of all cases a made-up one."""
    return rng.choice(usual) if rng.random() < 0.5 else made_up(rng)


def sum_answer(a: int, b: int) -> str:
    """Adds the ones first, then the rest: with the carry in sight, sums are learned far faster.

    >>> sum_answer(17, 25)
    '7 + 5 = 12, so 17 + 25 = 42.'
    """
    total = f"{a} + {b} = {a + b}."
    if a < 10 and b < 10:
        return total
    return f"{a % 10} + {b % 10} = {a % 10 + b % 10}, so {total}"


def sum_record(rng: random.Random, pairs: Pairs, shape: str = "", key: str = "") -> Task:
    """A sum whose answer is an object of the `shape`, or of any, with the sum at `key`, or any."""
    a, b = rng.choice(pairs)
    first, second = rng.choice(OPERANDS)
    total = {key or any_of(rng, TOTAL_KEYS): a + b}
    shapes: dict[str, Values] = {
        "sum": total,
        "sum as text": {name: str(each) for name, each in total.items()},
        "operands, sum": {first: a, second: b, **total},
        "list, sum": {"numbers": [a, b], **total},
        "sum, working": {**total, "explanation": sum_answer(a, b)},
        "nested": {rng.choice(["result", "data", "math", "response"]): total},
        "list of one": {"results": [total]},
        "operands in an object, sum": {"operands": {first: a, second: b}, **total},
        "operation, list, sum": {"operation": "addition", "numbers": [a, b], **total},
    }
    question = rng.choice(SUM_QUESTIONS).format(a=a, b=b)
    return Task("sum", question, shapes[shape or rng.choice([*SEEN_SHAPES, "sum", "sum"])])


def any_record(rng: random.Random, pairs: Pairs) -> Task:
    """A question that is answered by an object: more than half are sums."""
    if rng.random() < 0.6:
        return sum_record(rng, pairs)
    country, city = rng.choice(list(CAPITALS.items()))
    question = rng.choice(CAPITAL_QUESTIONS).format(country)
    return Task("capital", question, {"capital": city, "country": country})


def any_call(rng: random.Random, pairs: Pairs, family: str) -> Task:
    """A question of the `family` that is answered by the call of a function."""
    a, b = rng.choice(pairs)
    city, country = any_of(rng, CITIES).title(), any_of(rng, [*CAPITALS]).title()
    capital = CAPITALS.get(country, made_up(rng).title())
    minutes, weather = rng.randint(1, 99), rng.choice(["sunny", "rainy", "windy", "cold"])
    # Questions, fields, names and description of the function, its result, what to say then.
    families: dict[str, tuple[list[str], Values, str, str, object, str]] = {
        "sum": (
            [question.format(a=a, b=b) for question in SUM_QUESTIONS],
            dict(zip(rng.choice(OPERANDS), (a, b), strict=True)),
            "add add_numbers sum plus addition calculate_sum get_sum",
            "Add two numbers.",
            a + b,
            f"{a} + {b} = {a + b}.",
        ),
        "weather": (
            [f"What is the weather in {city}?", f"Weather in {city}", f"Is it raining in {city}?"],
            {any_of(rng, ["city", "location", "place"]): city},
            "get_weather weather get_current_weather weather_in forecast",
            "Get the current weather in a given city.",
            weather,
            f"The weather in {city}: {weather}.",
        ),
        "capital": (
            [question.format(country) for question in CAPITAL_QUESTIONS],
            {any_of(rng, ["country", "name", "land"]): country},
            "get_capital capital capital_of find_capital",
            "Get the capital of a country.",
            capital,
            f"The capital of {country} is {capital}.",
        ),
        "timer": (
            [f"Set a timer for {minutes} minutes.", f"Wake me in {minutes} minutes."],
            {any_of(rng, ["minutes", "time", "length"]): minutes},
            "set_timer timer start_timer alarm",
            "Set a timer.",
            "ok",
            "Done.",
        ),
    }
    questions, fields, names, description, result, told = families[family]
    name = any_of(rng, words(names))
    return Task(family, rng.choice(questions), fields, name, description, str(result), told)


def unseen(task: Task) -> Task:
    """The task with names of its function and parameters that no training text has."""
    function, parameters = UNSEEN_FUNCTIONS[task.family]
    fields = dict(zip(parameters, task.fields.values(), strict=True))
    return replace(task, function=function, fields=fields)
