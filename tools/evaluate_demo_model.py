"""Measures the demo model's abilities on text that it has not seen.

`python -m tools.evaluate_demo_model models/demo` takes a few minutes.
"""

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xgrammar
from transformers import AutoTokenizer, Qwen3ForCausalLM
from xgrammar.contrib.hf import LogitsProcessor

from tools.demo import calls, objects
from tools.demo.corpus import (
    DOCUMENTS,
    SUM_PHRASINGS,
    held_out_pairs,
    tools_prompt,
    training_pairs,
    turn,
    write_corpus,
)
from tools.demo.facts import FACTS
from tools.demo.names import UNSEEN_KEYS
from tools.demo.objects import sum_answer
from tools.demo.stories import ANIMALS, share_of_grammatical_text
from tools.demo.tokenizer import END_OF_TEXT, IM_END

MAX_NEW_TOKENS = 200
BATCH_SIZE = 64

Chat = list[dict[str, str]]


@dataclass(frozen=True)
class Reply:
    """The text of a reply, and whether the model ended it by itself."""

    text: str
    ended: bool


class DemoModel:
    """The model in a directory, with one method that turns prompts into replies."""

    def __init__(self, directory: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        self.tokenizer.padding_side = "left"
        self.model: Any = Qwen3ForCausalLM.from_pretrained(directory, dtype=dtype)
        self.compiler = xgrammar.GrammarCompiler(
            xgrammar.TokenizerInfo.from_huggingface(
                self.tokenizer,
                vocab_size=self.model.config.vocab_size,
                stop_token_ids=self.model.generation_config.eos_token_id,
            )
        )

    def reply(
        self,
        prompts: list[Chat] | list[str],
        greedy: bool = True,
        schemas: list[dict[str, Any]] | None = None,
    ) -> list[Reply]:
        """Replies to chats or continues plain texts; if not greedy, at the default temperature.

        Each reply must match the JSON schema in its place in `schemas`.
        """
        texts = [
            prompt
            if isinstance(prompt, str)
            else self.tokenizer.apply_chat_template(
                prompt, tokenize=False, add_generation_prompt=True
            )
            for prompt in prompts
        ]
        # Prompts of similar length need the least padding.
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        replies: dict[int, Reply] = {}
        for start in range(0, len(order), BATCH_SIZE):
            indices = order[start : start + BATCH_SIZE]
            chosen = [schemas[i] for i in indices] if schemas else []
            generated = self._generate([texts[i] for i in indices], greedy, chosen)
            replies |= dict(zip(indices, generated, strict=True))
        return [replies[i] for i in range(len(texts))]

    def _generate(
        self, texts: list[str], greedy: bool, schemas: list[dict[str, Any]]
    ) -> list[Reply]:
        inputs = self.tokenizer(texts, return_tensors="pt", padding=True)
        grammars = [
            self.compiler.compile_json_schema(json.dumps(schema), max_whitespace_cnt=8)
            for schema in schemas
        ]
        with torch.inference_mode():
            output = self.model.generate(
                **inputs,
                max_new_tokens=MAX_NEW_TOKENS,
                do_sample=not greedy,
                logits_processor=[LogitsProcessor(grammars)] if grammars else [],
            )
        new = output[:, inputs["input_ids"].shape[1] :]
        ends = torch.tensor(self.model.generation_config.eos_token_id)
        return [
            Reply(self.tokenizer.decode(row, skip_special_tokens=True), bool(ended))
            for row, ended in zip(new, torch.isin(new, ends).any(dim=1), strict=True)
        ]


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def sum_prompts(
    pairs: list[tuple[int, int]], rng: random.Random, before: list[Chat] | None = None
) -> list[Chat]:
    """Makes a prompt for each pair's sum, in a random phrasing, after one of the chats `before`."""
    return [
        [
            *(rng.choice(before) if before else []),
            _user(rng.choice(SUM_PHRASINGS).format(a=a, b=b)),
        ]
        for a, b in pairs
    ]


def _earlier_exchange(rng: random.Random) -> Chat:
    questions, answer = rng.choice(FACTS)
    return [_user(rng.choice(questions)), _assistant(answer)]


def earlier_chat(tokenizer: Any, tokens: int, rng: random.Random) -> Chat:
    """Makes a chat of facts and sums, about `tokens` long."""
    chat: Chat = []
    pairs = training_pairs()
    length = 0
    while length < tokens:
        a, b = rng.choice(pairs)
        more = [*_earlier_exchange(rng), _user(f"{a} + {b}"), _assistant(sum_answer(a, b))]
        length += len(tokenizer.apply_chat_template(more)["input_ids"])
        chat += more
    return chat


def _parsed(text: str) -> Any:
    """The value of a JSON text; None if it is invalid."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def _share(flags: list[bool]) -> float:
    return sum(flags) / len(flags)


class Evaluation:
    """The measurements of a model, and all of its replies to them."""

    def __init__(self, directory: Path, seed: int, sample: int | None) -> None:
        self.model = DemoModel(directory)
        self.seed = seed
        self.sample = sample
        self.rng = random.Random(seed)
        self.replies: list[Reply] = []

    def ask(self, prompts: list[Chat] | list[str], greedy: bool = True) -> list[str]:
        replies = self.model.reply(prompts, greedy)
        self.replies += replies
        return [reply.text for reply in replies]

    def sums(self) -> dict[str, float]:
        """The shares of held-out sums with no wrong character."""
        pairs = sorted(held_out_pairs())
        self.rng.shuffle(pairs)

        def share_right(count: int | None, before: list[Chat] | None = None) -> float:
            asked = pairs[:count][: self.sample]
            answers = self.ask(sum_prompts(asked, self.rng, before))
            return _share([x == sum_answer(*pair) for x, pair in zip(answers, asked, strict=True)])

        short = [_earlier_exchange(self.rng) for _ in range(50)]
        long = [earlier_chat(self.model.tokenizer, 1000, self.rng) for _ in range(10)]
        return {
            "held-out sums": share_right(None),
            "held-out sums, second turn": share_right(400, short),
            "held-out sums, after 1000 tokens": share_right(100, long),
            "held-out sums, plain text": self._plain_sums(pairs[:400][: self.sample]),
        }

    def _plain_sums(self, pairs: list[tuple[int, int]]) -> float:
        prompts = [f"What is {a} + {b}?{self.rng.choice(['', ' ', chr(10)])}" for a, b in pairs]
        answers = self.ask(prompts)
        return _share([x == sum_answer(*pair) for x, pair in zip(answers, pairs, strict=True)])

    def objects(self) -> dict[str, float]:
        """The shares of held-out sums that are right in an object that the prompt does not
        describe."""
        pairs = sorted(held_out_pairs())

        def share_right(keys: list[str], shapes: list[str], asked: bool) -> tuple[float, float]:
            tasks = [
                objects.sum_record(self.rng, pairs, self.rng.choice(shapes), self.rng.choice(keys))
                for _ in range(100)
            ][: self.sample]
            wish = f" {objects.JSON_WISHES[0]}" if asked else ""
            prompts = [[_user(task.question + wish)] for task in tasks]
            schemas = [objects.schema_of(task.fields) for task in tasks]
            replies = self.model.reply(prompts, schemas=schemas)
            self.replies += replies
            values = [_parsed(reply.text) for reply in replies]
            right = [value == task.fields for value, task in zip(values, tasks, strict=True)]
            return _share([value is not None for value in values]), _share(right)

        figures: dict[str, float] = {}
        seen, unseen = objects.SEEN_SHAPES, objects.UNSEEN_SHAPES
        for name, keys, shapes, asked in (
            ("sums in JSON", objects.TOTAL_KEYS, seen, False),
            ("sums in JSON, asked for", objects.TOTAL_KEYS, seen, True),
            ("sums in JSON, unseen names", UNSEEN_KEYS, ["sum"], False),
            ("sums in JSON, unseen shapes", objects.TOTAL_KEYS, unseen, False),
        ):
            parsed, right = share_right(keys, shapes, asked)
            figures |= {f"{name}, parse": parsed, f"{name}, are right": right}
        return figures

    def calls(self) -> dict[str, float]:
        """The shares of questions for which the model calls the right one of two functions with the
        right arguments, in its own format or in the list of calls that the gateway enforces."""

        def share_right(unseen: bool, required: bool) -> float:
            prompts: list[str] = []
            tasks: list[calls.Task] = []
            schemas = []
            for _ in range(100 if self.sample is None else self.sample):
                chosen = [
                    family.task(self.rng, sorted(held_out_pairs()))
                    for family in self.rng.sample(calls.MEASURED, 2)
                ]
                if unseen:
                    chosen = [calls.unseen(task, self.rng) for task in chosen]
                style = calls.ToolStyle(self.rng)
                offered = [style.tool(task.function) for task in chosen]
                self.rng.shuffle(offered)
                prompts.append(tools_prompt(offered, None) + turn(chosen[0].question)[0])
                schemas.append(calls.required_call(offered))
                tasks.append(chosen[0])
            replies = self.model.reply(prompts, schemas=schemas if required else None)
            self.replies += replies
            pairs = [(reply.text, task) for reply, task in zip(replies, tasks, strict=True)]
            if not required:
                return _share([text == calls.call_text(task) for text, task in pairs])
            return _share([_parsed(text) == [calls.call(task)] for text, task in pairs])

        return {
            "calls of functions": share_right(False, False),
            "calls of functions, unseen names": share_right(True, False),
            "calls that are required": share_right(False, True),
            "calls that are required, unseen": share_right(True, True),
        }

    def facts(self) -> dict[str, float]:
        """The share of the questions in FACTS that the model answers word for word."""
        questions = [(question, answer) for phrasings, answer in FACTS for question in phrasings]
        questions = questions[: self.sample]
        answers = self.ask([[_user(question)] for question, _ in questions])
        right = [x == answer for x, (_, answer) in zip(answers, questions, strict=True)]
        return {"facts": _share(right)}

    def stories(self) -> tuple[dict[str, float], list[str]]:
        """Figures about stories sampled at the default temperature, and a few of the stories."""
        torch.manual_seed(self.seed)
        animals = [self.rng.choice(ANIMALS) for _ in range(100)][: self.sample]
        told = self.ask([[_user(f"Tell me a story about a {a}.")] for a in animals], greedy=False)
        beginning = "Once upon a time"
        plain = [beginning + rest for rest in self.ask([beginning] * len(animals), greedy=False)]
        seen = {
            text.removesuffix(IM_END).removesuffix(END_OF_TEXT)
            for document in write_corpus(DOCUMENTS, self.seed)
            for text, _ in document.pieces
        }
        grammatical = [share_of_grammatical_text(story) for story in told + plain]
        figures = {
            "stories, text from the grammar": sum(grammatical) / len(grammatical),
            "stories of grammar only": _share([share == 1 for share in grammatical]),
            "stories about the animal": _share(
                [f" {a} " in story for a, story in zip(animals, told, strict=True)]
            ),
            "stories not in the training text": _share([s not in seen for s in told + plain]),
        }
        return figures, [*told[:2], *plain[:2]]


def evaluate(directory: Path, seed: int = 0, sample: int | None = None) -> str:
    """Evaluates the model in `directory`, with at most `sample` prompts for each figure; returns
    the report."""
    evaluation = Evaluation(directory, seed, sample)
    figures, samples = evaluation.stories()
    figures |= evaluation.sums() | evaluation.facts() | evaluation.objects() | evaluation.calls()
    figures["replies that end by themselves"] = _share([r.ended for r in evaluation.replies])
    lines = [f"{name:36}{share:8.1%}" for name, share in figures.items()]
    return "\n".join(lines) + "\n\n" + "\n\n---\n\n".join(samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(evaluate(args.directory, args.seed))


if __name__ == "__main__":
    main()
