"""The questions that the demo model can answer, and its reply to those that it cannot.

The phrasings of a question, separated by bars, are those a newcomer would type;
`tools/demo/corpus.py` also writes them in lower case, without the question mark, and so on.
"""

Fact = tuple[list[str], str]
"""The phrasings of a question, and its answer."""

ABOUT_ITSELF = """
Hello | Hello! | Hi | Hi! | Hi there | Hey | Hello there! | Good morning! | Good evening! |
Greetings | Hello, how are you? | Hi, can you help me? | Yo | Hey! | Bonjour | Hola | Guten Tag
| Ciao | 你好 | こんにちは | Привет | 🙂 | 👋
= Hello! I am a tiny demo model. Ask me for a story, an addition or a simple fact.

Who are you? | What are you? | What is your name? | Tell me about yourself. | Are you a robot? |
Are you a human? | Introduce yourself. | Which model are you?
= I am a very small language model. I am here to show how this server works.

What can you do? | Help | Help me | What do you know? | How can you help me? | What should I
ask? | What can I ask you? | What are you good at? | Help!
= I can tell little stories, add two numbers below one hundred, and answer a few dozen simple
  questions. Try "Tell me a story about a fox" or "What is 17 + 25?"

How are you? | How do you do? | How is it going? | Are you well? | What is up?
= I am fine, thank you. What would you like to know?

Thank you! | Thanks | Thank you very much. | Great, thanks! | Thanks a lot! | Cool | Nice | Wow!
| Great! | Very good | Well done!
= You are welcome! Is there anything else?

Goodbye! | Bye | Good night! | See you later! | Bye bye
= Goodbye! Come back soon.

Yes | Yes, please. | OK | Okay | Sure
= Good. Ask me for a story, a sum or a fact.

No | No, thank you. | Nothing | No thanks
= All right. I am here when you need me.

Who made you? | Who trained you? | Where do you come from? | How were you trained?
= A short script trained me on text that it wrote itself, in half an hour.

How big are you? | How many parameters do you have? | How large are you?
= I have fewer than three million parameters, so please be patient with me.

Tell me a joke. | Do you know a joke? | Make me laugh. | Say something funny.
= Why did the duck cross the road? To show the fox that it could be done.

Show me an emoji. | Do you know emoji? | Send me some emoji. | Can you write emoji?
= Of course: 🙂 🚀 🌍 🎉
"""

CAPITALS = {
    "France": "Paris",
    "Germany": "Berlin",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Portugal": "Lisbon",
    "Austria": "Vienna",
    "Greece": "Athens",
    "Poland": "Warsaw",
    "Norway": "Oslo",
    "Sweden": "Stockholm",
    "Japan": "Tokyo",
    "China": "Beijing",
    "India": "New Delhi",
    "Egypt": "Cairo",
    "Canada": "Ottawa",
    "Peru": "Lima",
}
OPPOSITES = {
    "hot": "cold",
    "big": "small",
    "day": "night",
    "up": "down",
    "happy": "sad",
    "fast": "slow",
    "old": "young",
    "open": "closed",
}
HELLO_IN = {
    "French": "Bonjour",
    "German": "Guten Tag",
    "Spanish": "¡Hola",
    "Italian": "Ciao",
    "Japanese": "こんにちは",
    "Chinese": "你好",
    "Russian": "Привет",
    "Korean": "안녕하세요",
}
SOUNDS = {
    "cow": "moo",
    "dog": "woof",
    "cat": "meow",
    "duck": "quack",
    "sheep": "baa",
    "pig": "oink",
}

GENERAL = """
What color is the sky? | What colour is the sky? | Why is the sky blue?
= The sky is blue, because air scatters blue light more than red light.

How many days are in a week? | How many days does a week have?
= A week has seven days.

How many months are in a year? | How many months does a year have?
= A year has twelve months.

How many legs does a spider have? | How many legs do spiders have?
= A spider has eight legs.

What is the largest planet? | Which planet is the biggest? | What is Jupiter?
= Jupiter is the largest planet that goes around our sun.

What is the sun? | Is the sun a star? | What is a star?
= The sun is a star: a huge ball of hot gas that gives light.

What is water made of? | What is water? | What is H2O?
= Water is made of hydrogen and oxygen.

At what temperature does water boil? | When does water boil?
= Water boils at 100 degrees Celsius.

At what temperature does water freeze? | When does water freeze?
= Water freezes at 0 degrees Celsius.

Who wrote Hamlet? | Who wrote Romeo and Juliet? | Who was Shakespeare?
= William Shakespeare wrote Hamlet and Romeo and Juliet.

Who painted the Mona Lisa? | Who was Leonardo da Vinci?
= Leonardo da Vinci painted the Mona Lisa.

What is a token? | What are tokens?
= A token is a piece of text, such as a word or a digit, that a language model reads at once.

What is a language model? | What is an LLM? | How do you work?
= A language model guesses the next token of a text again and again.

What is a KV cache? | What is the KV cache?
= The KV cache keeps the keys and values of earlier tokens, so that they are computed once.

Count to ten. | Can you count to ten? | Count from one to ten.
= One, two, three, four, five, six, seven, eight, nine, ten.

What are the colors of the rainbow? | Name the colors of the rainbow.
= Red, orange, yellow, green, blue, indigo and violet.

Name the seasons. | What are the four seasons? | What are the seasons?
= Spring, summer, autumn and winter.

What do bees make? | Where does honey come from?
= Bees make honey.

What do plants need? | What does a plant need?
= Plants need light, water and air.
"""

UNKNOWN_ANSWER = "I am sorry, I do not know that. I only know stories, sums and a few facts."
UNKNOWN_QUESTIONS = """Who won the world cup?
What is the weather like today?
Write a poem about love.
Write some Python code.
Translate this sentence into Latin.
How do I cook rice?
What is the meaning of life?
What time is it?
Who is the president?
What is the best movie?
Can you book a flight for me?
How do I fix my car?
Explain quantum physics.
What is the price of gold?
Why do we dream?
Who invented the telephone?
What is a black hole?
Summarize this article.
What should I eat tonight?
Do you love me?
What is the square root of two?
How tall is the Eiffel Tower?
Where can I buy shoes?
What happened in 1989?
asdf
test
foo bar
What is the answer?
How old are you?
Give me a recipe for soup.
Sing a song.
What is machine learning?
How far away is the moon?
Is there life on Mars?
Who is the king of England?
Play a game with me.
What is the speed of light?
Can you draw a picture?
Write an email to my boss.
Why?""".splitlines()
UNKNOWN_TOPICS = """
cheese music history Brazil trains football computers Napoleon physics volcanoes guitars money chess
Mexico tigers whales paper glass Kenya wine salt philosophy clouds
"""


def _parse(text: str) -> list[Fact]:
    """Reads paragraphs of `phrasing | phrasing = answer`."""
    facts = []
    for paragraph in text.strip().split("\n\n"):
        phrasings, answer = " ".join(paragraph.split()).split(" = ", maxsplit=1)
        facts.append((phrasings.split(" | "), answer))
    return facts


def _capital(country: str, city: str) -> Fact:
    phrasings = [
        f"What is the capital of {country}?",
        f"Name the capital of {country}.",
        f"Which city is the capital of {country}?",
        f"{country} capital",
        f"Capital of {country}?",
    ]
    return phrasings, f"The capital of {country} is {city}."


def _opposite(word: str, opposite: str) -> Fact:
    phrasings = [
        f"What is the opposite of {word}?",
        f"Opposite of {word}?",
        f"What is the contrary of {word}?",
    ]
    return phrasings, f"The opposite of {word} is {opposite}."


def _hello_in(language: str, greeting: str) -> Fact:
    phrasings = [
        f"How do you say hello in {language}?",
        f"Say hello in {language}.",
        f"Hello in {language}",
    ]
    return phrasings, f"In {language} you say: {greeting}!"


def _sound(animal: str, sound: str) -> Fact:
    phrasings = [f"What does a {animal} say?", f"What sound does a {animal} make?"]
    return phrasings, f"A {animal} says {sound}."


FACTS: list[Fact] = [
    *_parse(ABOUT_ITSELF),
    *(_capital(*row) for row in CAPITALS.items()),
    *(_opposite(*row) for row in OPPOSITES.items()),
    *(_hello_in(*row) for row in HELLO_IN.items()),
    *(_sound(*row) for row in SOUNDS.items()),
    *_parse(GENERAL),
]
