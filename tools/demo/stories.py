"""A grammar of the little stories that the demo model is trained to tell.

A story is an opening, a setting, an outing, one of several plots and an ending. Each of these is a
sentence from a few templates, whose slots are filled once per story. So a name, a pronoun or a lost
hat stays the same from the first sentence to the last.
"""

import random
import re
from dataclasses import dataclass
from functools import cache

words = str.split


def phrases(text: str) -> list[str]:
    """The phrases of a text, which bars separate."""
    return [" ".join(phrase.split()) for phrase in text.split("|")]


BOYS = words("Tom Ben Max Leo Sam Finn Otto Hugo Paul Jack Noah Felix")
GIRLS = words("Mia Anna Lily Rosa Emma Nora Lucy Ella Clara Ruby Zoe Ida")
ANIMALS = words("""fox rabbit bear mouse cat dog duck frog hedgehog squirrel turtle pony lamb goat
robin beaver penguin dragon""")

# Slots for the same kind of thing share a list; in a template, a digit tells them apart.
SLOTS: dict[str, list[str]] = {
    "name": BOYS + GIRLS,
    "animal": ANIMALS,
    "adj": words("little young brave curious shy cheerful clever gentle merry quiet small funny"),
    "kind": words("friendly wise kind helpful patient big tall grey"),
    "home": phrases("""in a warm house by the river | under an old oak tree | in a green valley
        | at the edge of the forest | near the sea | on a small farm | behind the blue hills
        | in a tiny village"""),
    "hobby": phrases("""singing songs | painting pictures | counting the stars | baking bread
        | climbing trees | reading books | picking flowers | dancing in the rain | flying kites"""),
    "weather": words("sunny rainy windy cold warm bright foggy"),
    "daytime": words("morning afternoon evening day"),
    "goal": phrases("""to the market | to the lake | into the forest | up the hill | to the beach
        | to the old mill | across the bridge | to the meadow"""),
    "thing": words("hat scarf ball kite drum lamp book basket key bell"),
    "spot": phrases("""under a bush | behind a rock | in the tall grass | beside the path
        | under a bench | near the well | in a hollow log | behind the barn"""),
    "food": words("apples berries carrots nuts pancakes cherries cookies pears"),
    "noise": phrases("a strange sound | a loud crack | a soft cry | a deep growl | a knock"),
    "build": phrases("a boat | a tree house | a bridge | a snowman | a sand castle | a sledge"),
    "lesson": phrases("""that good friends help each other | that it is brave to ask for help
        | that sharing makes everyone happy | that small steps lead far | that patience pays off
        | that kind words cost nothing | that nobody is too small to help"""),
    "joy": phrases("""danced all the way home | laughed out loud | sang a happy song
        | jumped for joy | smiled from ear to ear | hugged everyone"""),
}
PRONOUNS = {"he": "she", "He": "She", "his": "her", "His": "Her", "him": "her"}

# A line is a template, and a paragraph has the templates for one sentence.
BEGIN = """
Once upon a time there was a {adj} {animal} called {name}.
Once upon a time, a {adj} {animal} called {name} lived {home}.
Once upon a time there lived a {adj} {animal} whose name was {name}.
Once upon a time, {home}, there was a {adj} {animal} named {name}.

{name} loved {hobby} more than anything else.
Every day {he} spent hours {hobby}.
{He} was good at {hobby}, and everybody knew it.
All the animals liked {name}, because {he} was always {hobby}.
{His} favourite food was {food}, and {he} also loved {hobby}.
"""
OUTING = """
One {weather} {daytime}, {name} went {goal}.
One {weather} {daytime}, {he} walked {goal} all alone.
On a {weather} {daytime}, {name} set out {goal} with a basket of {food}.
One {weather} {daytime}, {name} packed some {food} and went {goal}.
"""
MEETING = """
Then a {kind} {animal2} called {name2} came along.
Just then {he} met {name2}, a {kind} {animal2}.
There {he} met a {kind} {animal2} named {name2}.
Luckily, a {kind} {animal2} called {name2} was not far away.
"""
LOST = """
On the way {he} noticed that {his} {thing} was gone.
Suddenly {he} saw that {he} had lost {his} {thing}.
But when {he} stopped to rest, {his} {thing} was missing.

{name} looked {spot} and {spot2}, but it was not there.
{He} searched {spot} and found only some {food}.

{meeting}

"Why do you look so sad?" asked {name2}.
"What is the matter?" asked {name2}.

"I have lost my {thing}," said {name}.
"My {thing} is gone," answered {name}.

They searched together and found the {thing} {spot3}.
{name2} had sharp eyes and soon saw the {thing} {spot3}.
"""
SOUND = """
Suddenly {name} heard {noise}.
After a while {he} heard {noise} from far away.
It grew dark, and then {he} heard {noise}.

{He} was so scared that {he} hid {spot}.
{name} shook with fear and hid {spot}.

{meeting}

"Do not be afraid," said {name2}, "it is only the wind."
"Come out, it is only me," said {name2}.
"There is nothing to fear," said {name2}.

They sat down {spot2} and shared some {food}.
They lit a lamp and waited together until it was quiet.
"""
HUNGRY = """
Soon {he} was very hungry, but {he} had nothing to eat.
{His} bag of {food} fell into the water, and {he} grew hungry.

{meeting}

"Would you like some of my {food}?" asked {name2}.
"Sit down and eat with me," said {name2}, and gave {him} some {food}.

{name} thanked {name2} and ate until {he} was full.
They ate {spot} and talked about {hobby}.

The next day {name} brought {name2} a basket of {food2}.
In return, {name} gave {name2} {his} own {thing}.
"""
BUILD = """
{He} wanted to build {build}, but it was too much work for one.
{name} tried to build {build}, but it fell down again and again.

{meeting}

"May I help you?" asked {name2}.
"Two can do more than one," said {name2}.
"I know how to do that," said {name2}.

They worked all {daytime} and did not stop to rest.
{name2} carried the wood, and {name} did the rest.

When they were done, it was the best one that anybody had seen.
At last it was ready, and they celebrated with {food}.
"""
HELP = """
{spot_start} {he} found a {kind} {animal2} called {name2}, who could not walk.
{spot_start} sat {name2}, a {kind} {animal2}, and cried.

"Please help me, I cannot find my way home," said {name2}.
"I have hurt my foot," said {name2}.

{name} gave {name2} some {food} and a {thing}.
{name} took {name2} by the hand and sang a song.

Together they walked slowly {goal2}, where {name2} lived.
They went home step by step and got there before night.
"""
END = """
{name} was so happy that {he} {joy}.
{name} and {name2} {joy}.
That night {name} dreamed of {hobby2}.
{name} thanked {name2} and {joy}.

From that day on, {name} and {name2} were best friends.
And {name} never forgot {lesson}.
So {name} learned {lesson}.
And they all lived happily ever after.
"""
PLOTS = [plot.replace("{meeting}", MEETING.strip()) for plot in (LOST, SOUND, HUNGRY, BUILD, HELP)]


@dataclass(frozen=True)
class Story:
    """A story, and the character it is about, whom a reader may ask for."""

    text: str
    animal: str
    name: str


def write_story(rng: random.Random) -> Story:
    """Writes a story of three paragraphs, about a hundred words.

    `spot`, `spot2` and `spot3` differ, and so do the two characters.
    """
    values: dict[str, str] = {}
    for slot, choices in SLOTS.items():
        first, second, third = rng.sample(choices, 3)
        values |= {slot: first, f"{slot}2": second, f"{slot}3": third}
    values["spot_start"] = values["spot"].capitalize()
    values |= PRONOUNS if values["name"] in GIRLS else {he: he for he in PRONOUNS}
    text = "\n\n".join(
        " ".join(
            rng.choice(sentence.splitlines()).format(**values)
            for sentence in part.strip().split("\n\n")
        )
        for part in (BEGIN, OUTING + rng.choice(PLOTS), END)
    )
    return Story(text, values["animal"], values["name"])


@cache
def sentence_pattern() -> re.Pattern[str]:
    """A pattern that matches exactly the sentences that the grammar can write."""
    slots = SLOTS | {he: [he, she] for he, she in PRONOUNS.items()}
    slots["spot_start"] = [spot.capitalize() for spot in SLOTS["spot"]]

    def pattern(template: str) -> str:
        texts = re.split(r"\{(\w+?)[23]?\}", template)  # text, slot, text, slot, ..., text
        parts = [
            "(?:" + "|".join(map(re.escape, slots[text])) + ")" if i % 2 else re.escape(text)
            for i, text in enumerate(texts)
        ]
        return "".join(parts)

    templates = "\n".join([BEGIN, OUTING, *PLOTS, END]).splitlines()
    return re.compile("|".join(map(pattern, filter(None, templates))))


def share_of_grammatical_text(text: str) -> float:
    """The share of `text`, in characters other than white space, that the grammar could write."""
    matched = "".join(match.group() for match in sentence_pattern().finditer(text))
    return len("".join(matched.split())) / max(1, len("".join(text.split())))
