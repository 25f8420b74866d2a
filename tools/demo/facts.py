"""The questions that the demo model can answer, and its reply to those that it cannot.

The phrasings of a question, separated by bars, are those a newcomer would type.
"""

from tools.demo.stories import phrases

Fact = tuple[list[str], str]
"""The phrasings of a question, and its answer."""

TEXT = """
Hello | Hello! | Hi | Hi! | Hi there | Hey | Good morning! | Hello, how are you? | Bonjour | 你好
= Hello! I am a tiny demo model. Ask me for a story, an addition or a simple fact.

Who are you? | What are you? | What is your name? | Tell me about yourself. | Are you a robot?
= I am a very small language model. I am here to show how this server works.

What can you do? | Help | Help me | What do you know? | What should I ask? | What can I ask you?
= I can tell little stories, add two numbers below one hundred, and answer a few dozen simple
  questions. Try "Tell me a story about a fox" or "What is 17 + 25?"

Thank you! | Thanks | Thank you very much. | Great, thanks! | Cool | Very good | Well done!
= You are welcome! Is there anything else?

Who made you? | Who trained you? | Where do you come from? | How were you trained?
= A short script trained me on text that it wrote itself, in half an hour.

Tell me a joke. | Do you know a joke? | Make me laugh. | Say something funny.
= Why did the duck cross the road? To show the fox that it could be done.

What color is the sky? | What colour is the sky? | Why is the sky blue?
= The sky is blue, because air scatters blue light more than red light.

What is water made of? | What is water? | What is H2O?
= Water is made of hydrogen and oxygen.

Who wrote Hamlet? | Who wrote Romeo and Juliet? | Who was Shakespeare?
= William Shakespeare wrote Hamlet and Romeo and Juliet.

What is a token? | What are tokens?
= A token is a piece of text, such as a word or a digit, that a language model reads at once.

What is a KV cache? | What is the KV cache?
= The KV cache keeps the keys and values of earlier tokens, so that they are computed once.

Count to ten. | Can you count to ten? | Count from one to ten.
= One, two, three, four, five, six, seven, eight, nine, ten.
"""
CAPITALS = dict(
    pair.split(" - ")
    for pair in phrases("""France - Paris | Germany - Berlin | Italy - Rome | Spain - Madrid
    | Portugal - Lisbon | Austria - Vienna | Greece - Athens | Poland - Warsaw | Norway - Oslo
    | Sweden - Stockholm | Japan - Tokyo | China - Beijing | India - New Delhi | Egypt - Cairo
    | Canada - Ottawa | Peru - Lima""")
)
CAPITAL_QUESTIONS = phrases("""What is the capital of {}? | Name the capital of {}.
    | Which city is the capital of {}? | Capital of {}?""")

UNKNOWN_ANSWER = "I am sorry, I do not know that. I only know stories, sums and a few facts."
UNKNOWN_QUESTIONS = phrases("""Who won the world cup? | What is the weather like today? | Why?
    | Write a poem about love. | Write some Python code. | How do I cook rice? | What time is it?
    | Who is the president? | How do I fix my car? | Explain quantum physics. | asdf | test
    | What is the price of gold? | What is a black hole? | Summarize this article. | foo bar
    | What is machine learning? | Who invented the telephone? | Can you draw a picture?""")


def _facts() -> list[Fact]:
    found = []
    for paragraph in TEXT.strip().split("\n\n"):
        questions, answer = " ".join(paragraph.split()).split(" = ", maxsplit=1)
        found.append((phrases(questions), answer))
    for country, city in CAPITALS.items():
        asked = [question.format(country) for question in CAPITAL_QUESTIONS]
        found.append((asked, f"The capital of {country} is {city}."))
    return found


FACTS: list[Fact] = _facts()
