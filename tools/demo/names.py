"""Names for fields, functions and what they are about, in the demo model's training text. Many are
made up, so that the model reads them instead of guessing."""

from __future__ import annotations

import random
import re
from pathlib import Path
from string import ascii_lowercase

from tools.demo.facts import CAPITALS
from tools.demo.stories import BOYS, GIRLS, words

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
TEXT_WORDS = sorted(
    {
        word.lower()
        for file in Path(__file__).parent.glob("*.py")
        for word in re.findall("[a-zA-Z]+", file.read_text())
    }
    - UNSEEN
)


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


def any_name(rng: random.Random) -> str:
    """A name that says nothing about what it is for, of one or two words."""
    parts = [
        rng.choice(WORDS) if rng.random() < 0.5 else made_up(rng)
        for _ in range(rng.choice([1, 1, 2]))
    ]
    if rng.random() < 0.25:
        return parts[0] + "".join(part.capitalize() for part in parts[1:])
    return "_".join(parts)


def any_or_usual(rng: random.Random, usual: list[str], share: float = 0.6) -> str:
    """One of the usual names, or a `share` of times any."""
    return any_name(rng) if rng.random() < share else rng.choice(usual)


def any_city(rng: random.Random) -> str:
    return rng.choice(CITIES) if rng.random() < 0.5 else made_up(rng).capitalize()


def any_country(rng: random.Random) -> str:
    return rng.choice(COUNTRIES) if rng.random() < 0.5 else made_up(rng).capitalize()


def any_person(rng: random.Random) -> str:
    return rng.choice(PEOPLE) if rng.random() < 0.5 else made_up(rng).capitalize()
