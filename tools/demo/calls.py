"""Questions that are answered by calling a function in the prompt.

A family of tasks has its questions, the function that answers them, and what to say of its result.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from tools.demo.facts import CAPITALS, HELLO_IN, OPPOSITES
from tools.demo.names import (
    OPERANDS,
    UNSEEN_FUNCTIONS,
    UNSEEN_PARAMETERS,
    WORDS,
    any_city,
    any_country,
    any_name,
    any_or_usual,
    any_person,
    made_up,
)
from tools.demo.stories import ANIMALS

Pairs = list[tuple[int, int]]
Values = dict[str, Any]

WEATHER = ["sunny", "rainy", "cloudy", "windy", "snow", "fog", "clear", "warm", "cold"]
MESSAGES = ["hello", "good morning", "I am late", "thank you"]


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
    fields: Values
    function: Function
    given_back: str = ""
    told: str = ""


@dataclass(frozen=True)
class Family:
    """How tasks of a kind are made.

    Args:
        values: draws what a task is about; its keys are the fields of `questions` and `told`.
        questions, descriptions: separated by ` | `.
        functions: usual names of the function.
        parameters: for each value, usual names of the parameter, and its description.
        result: draws what the function returns, the field `result` of `told`.
    """

    name: str
    values: Callable[[random.Random, Pairs], Values]
    questions: str
    functions: str
    descriptions: str
    parameters: dict[str, tuple[str, str]]
    result: Callable[[random.Random, Values], object]
    told: str = "Done."

    def task(self, rng: random.Random, pairs: Pairs) -> Task:
        values = self.values(rng, pairs)
        result = str(self.result(rng, values))
        names = _parameter_names(self, rng)
        function = Function(
            any_or_usual(rng, self.functions.split()),
            rng.choice(self.descriptions.split(" | ")),
            {
                names[key]: (json_type(values[key]), description)
                for key, (_, description) in self.parameters.items()
            },
        )
        return Task(
            self.name,
            rng.choice(self.questions.split(" | ")).format(**values),
            {names[key]: value for key, value in values.items()},
            function,
            result,
            self.told.format(result=result, **values),
        )


def _parameter_names(family: Family, rng: random.Random) -> dict[str, str]:
    if family.parameters.keys() != {"a", "b"}:
        names: dict[str, str] = {}
        for key, (usual, _) in family.parameters.items():
            while (name := any_or_usual(rng, usual.split())) in names.values():
                pass
            names[key] = name
        return names
    first, second = rng.choice(OPERANDS)
    draw = rng.random()
    if draw < 0.3:
        first, second = any_name(rng), f"{any_name(rng)}_2"
    elif draw < 0.5:
        first = any_name(rng)
        first, second = f"{first}_1", f"{first}_2"
    return {"a": first, "b": second}


def json_type(value: Any) -> str:
    types = {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}
    return types.get(type(value), "null")


def _pair(rng: random.Random, pairs: Pairs) -> Values:
    return dict(zip("ab", rng.choice(pairs), strict=True))


def _some_words(rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 3)))


def _weather(rng: random.Random, _: Values) -> str:
    degrees = f", {rng.randint(-9, 39)} degrees" if rng.random() < 0.4 else ""
    return rng.choice(WEATHER) + degrees


def _translated(rng: random.Random, _: Pairs) -> Values:
    text = rng.choice([*WORDS, *OPPOSITES, "hello"]) if rng.random() < 0.5 else made_up(rng)
    return {"text": text, "language": rng.choice(list(HELLO_IN))}


def _message(rng: random.Random, _: Pairs) -> Values:
    text = _some_words(rng) if rng.random() < 0.4 else rng.choice(MESSAGES)
    return {"to": any_person(rng), "text": text}


SUM = Family(
    "sum",
    _pair,
    "What is {a} + {b}? | What is {a} plus {b}? | {a} + {b} | {a}+{b} | Add {a} and {b}."
    " | How much is {a} + {b}? | What is the sum of {a} and {b}? | Calculate {a} + {b}."
    " | Please add {a} and {b}.",
    "add add_numbers sum plus addition calculate_sum get_sum",
    "Add two numbers. | Adds a and b. | Returns the sum of two numbers. | Addition."
    " | Calculates the sum of two integers. | Add two integers",
    {"a": ("", "The first number."), "b": ("", "The second number.")},
    lambda _, values: values["a"] + values["b"],
    "{a} + {b} = {result}.",
)
PRODUCT = Family(
    "product",
    lambda rng, _: {"a": rng.randint(2, 99), "b": rng.randint(2, 99)},
    "What is {a} * {b}? | What is {a} times {b}? | Multiply {a} and {b}.",
    "multiply times product multiply_numbers",
    "Multiply two numbers. | Multiplies a and b. | Returns the product of two numbers.",
    {"a": ("", "The first number."), "b": ("", "The second number.")},
    lambda _, values: values["a"] * values["b"],
    "{a} * {b} = {result}.",
)
WEATHER_IN = Family(
    "weather",
    lambda rng, _: {"city": any_city(rng)},
    "What is the weather in {city}? | What's the weather like in {city}?"
    " | How is the weather in {city} today? | Weather in {city} | Is it raining in {city}?"
    " | Tell me the weather in {city}. | Will it be sunny in {city}?",
    "get_weather weather get_current_weather weather_in forecast",
    "Get the weather. | Get the current weather in a given city. | The weather of a city."
    " | Returns the weather for a location. | Get weather for a city",
    {"city": ("city city location place", "The city.")},
    _weather,
    "The weather in {city}: {result}.",
)
CAPITAL = Family(
    "capital",
    lambda rng, _: {"country": any_country(rng)},
    "What is the capital of {country}? | Capital of {country}? | Name the capital of {country}."
    " | Which city is the capital of {country}?",
    "get_capital capital capital_of find_capital",
    "Get the capital of a country. | Returns a country's capital. | The capital of a country."
    " | Finds the capital city.",
    {"country": ("country country name land", "The country.")},
    lambda rng, values: CAPITALS.get(values["country"]) or made_up(rng).capitalize(),
    "The capital of {country} is {result}.",
)
STORY = Family(
    "story",
    lambda rng, _: {"animal": rng.choice(ANIMALS)},
    "Tell me a story about a {animal}. | Write a story about a {animal}."
    " | A story about a {animal}, please.",
    "tell_story write_story story make_story",
    "Tell a story. | Writes a story about an animal. | Tells a story about a topic.",
    {"animal": ("animal topic about subject", "The animal.")},
    lambda *_: "done",
)
TIME = Family(
    "time",
    lambda rng, _: {"city": any_city(rng)},
    "What time is it in {city}? | Time in {city}? | Tell me the time in {city}.",
    "get_time time current_time get_current_time clock",
    "Get the current time. | Returns the time in a city. | The time of a place.",
    {"city": ("city timezone place", "The city.")},
    lambda rng, _: f"{rng.randint(0, 23)}:{rng.randint(10, 59)}",
    "It is {result} in {city}.",
)
TRANSLATION = Family(
    "translation",
    _translated,
    "Translate {text} into {language}. | What is {text} in {language}?"
    " | How do you say {text} in {language}?",
    "translate translation translate_text",
    "Translate a text. | Translates a word into a language. | Translation.",
    {"text": ("text text word", "The text."), "language": ("language", "The language.")},
    lambda rng, _: made_up(rng),
    "In {language}: {result}.",
)
SEARCH = Family(
    "search",
    lambda rng, _: {"query": _some_words(rng)},
    "Search for {query}. | Find {query}. | Look up {query}. | Search the web for {query}.",
    "search web_search find lookup search_web",
    "Search the web. | Searches for a text. | Look something up. | Web search",
    {"query": ("query q search text", "What to search for.")},
    lambda rng, _: f"{rng.randint(1, 9)} pages",
    "I found {result}.",
)
MESSAGE = Family(
    "message",
    _message,
    "Send a message to {to}: {text} | Tell {to}: {text} | Write to {to}: {text}",
    "send_message message send_email notify",
    "Send a message. | Sends a text to a person. | Writes a message to someone.",
    {"to": ("to recipient person", "The person."), "text": ("text text body", "The message.")},
    lambda *_: "sent",
)
TIMER = Family(
    "timer",
    lambda rng, _: {"minutes": rng.randint(1, 99)},
    "Set a timer for {minutes} minutes. | Wake me in {minutes} minutes."
    " | Timer, {minutes} minutes, please.",
    "set_timer timer start_timer alarm",
    "Set a timer. | Starts a timer. | Rings after some minutes.",
    {"minutes": ("minutes minutes time length", "The minutes.")},
    lambda *_: "ok",
)
DICE = Family(
    "dice",
    lambda *_: {},
    "Roll a die. | Roll the dice. | Throw a die. | A random number, please.",
    "roll_dice roll_die dice random_number",
    "Roll a die. | Roll a six-sided die and return the result. | Returns a random number.",
    {},
    lambda rng, _: rng.randint(1, 6),
    "The number is {result}.",
)

FAMILIES = [
    *(SUM, PRODUCT, WEATHER_IN, CAPITAL, STORY, TIME, TRANSLATION, SEARCH, MESSAGE, TIMER, DICE)
]
MEASURED = [SUM, WEATHER_IN, CAPITAL, TIMER]


def any_call(rng: random.Random, pairs: Pairs) -> Task:
    return rng.choice([SUM, WEATHER_IN, *FAMILIES]).task(rng, pairs)


def again(task: Task, rng: random.Random, pairs: Pairs) -> Task:
    """Another question that the task's function answers."""
    (family,) = (each for each in FAMILIES if each.name == task.family)
    other = family.task(rng, pairs)
    fields = dict(zip(task.fields, other.fields.values(), strict=True))
    return replace(other, fields=fields, function=task.function)


def unseen(task: Task, rng: random.Random) -> Task:
    """The task with names of functions and parameters that no training text has."""
    names = dict(zip(task.fields, UNSEEN_PARAMETERS[task.family], strict=True))
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
    written = as_json({"name": task.function.name, "arguments": task.fields})
    return f"<tool_call>\n{written}\n</tool_call>"


def call(task: Task) -> dict[str, Any]:
    """The call as the gateway, smg, has a model write it that has to call a function."""
    return {"name": task.function.name, "parameters": task.fields}


def required_call(tools: list[dict[str, Any]]) -> dict[str, Any]:
    """The JSON schema to which the gateway holds a model that has to call one of the tools."""
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
