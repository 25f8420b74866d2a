"""Measures the demo model's abilities on text that it has not seen.

`python -m tools.evaluate_demo_model models/demo` takes a few minutes.
"""

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
import xgrammar
from transformers import AutoTokenizer, Qwen3ForCausalLM
from xgrammar.contrib.hf import LogitsProcessor

from tools.demo import tasks
from tools.demo.corpus import held_out_pairs, tools_prompt, turn
from tools.demo.facts import FACTS
from tools.demo.stories import ANIMALS, share_of_grammatical_text
from tools.demo.tasks import sum_answer

MAX_NEW_TOKENS = 200
BATCH_SIZE = 64


class DemoModel:
    """The model in a directory, which turns prompts into replies.

    Attributes:
        ended: for every reply so far, whether the model ended it by itself.
    """

    def __init__(self, directory: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
        self.tokenizer.padding_side = "left"
        self.model: Any = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
        self.ended: list[bool] = []
        ends = self.model.generation_config.eos_token_id
        info = xgrammar.TokenizerInfo.from_huggingface(
            self.tokenizer, vocab_size=self.model.config.vocab_size, stop_token_ids=ends
        )
        self._compiler = xgrammar.GrammarCompiler(info)

    def chat(self, *turns: str) -> str:
        """The prompt of a chat: turns of a user and the assistant, the user's first."""
        roles = ["user", "assistant"] * len(turns)
        messages = [{"role": r, "content": c} for r, c in zip(roles, turns, strict=False)]
        text: str = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return text

    def reply(
        self, prompts: list[str], schemas: list[dict[str, Any]] | None = None, greedy: bool = True
    ) -> list[str]:
        """Continues prompts; if not greedy, at the default temperature.

        Each reply must match the JSON schema in its place in `schemas`.
        """
        replies: list[str] = []
        for start in range(0, len(prompts), BATCH_SIZE):
            some = slice(start, start + BATCH_SIZE)
            inputs = self.tokenizer(prompts[some], return_tensors="pt", padding=True)
            compiled = [
                self._compiler.compile_json_schema(json.dumps(schema), max_whitespace_cnt=8)
                for schema in (schemas or [])[some]
            ]
            with torch.inference_mode():
                output = self.model.generate(
                    **inputs,
                    max_new_tokens=MAX_NEW_TOKENS,
                    do_sample=not greedy,
                    logits_processor=[LogitsProcessor(compiled)] if compiled else [],
                )
            new = output[:, inputs["input_ids"].shape[1] :]
            ends = torch.tensor(self.model.generation_config.eos_token_id)
            self.ended += torch.isin(new, ends).any(dim=1).tolist()
            replies += [self.tokenizer.decode(row, skip_special_tokens=True) for row in new]
        return replies


def _share(found: list[Any], right: list[Any]) -> float:
    return sum(bool(x == y) for x, y in zip(found, right, strict=True)) / len(right)


def parsed(text: str) -> Any:
    """The value of a JSON text; None if it is invalid."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def sums(model: DemoModel, rng: random.Random, count: int) -> dict[str, float]:
    """The shares of held-out sums with no wrong character."""
    pairs = rng.sample(sorted(held_out_pairs()), count)
    right = [sum_answer(*pair) for pair in pairs]
    asked = [rng.choice(tasks.SUM_QUESTIONS).format(a=a, b=b) for a, b in pairs]

    def earlier(turns: int) -> list[str]:
        facts = [rng.choice(FACTS) for _ in range(turns)]
        return [text for questions, answer in facts for text in (rng.choice(questions), answer)]

    def share_right(turns: int) -> float:
        prompts = [model.chat(*earlier(turns), question) for question in asked]
        return _share(model.reply(prompts), right)

    plain = [f"What is {a} + {b}?\n" for a, b in pairs]
    return {
        "held-out sums": share_right(0),
        "held-out sums, second turn": share_right(1),
        "held-out sums, after 25 turns": share_right(25),
        "held-out sums, plain text": _share(model.reply(plain), right),
    }


def records(model: DemoModel, rng: random.Random, count: int) -> dict[str, float]:
    """The shares of held-out sums that are right in an object that the prompt does not describe."""
    pairs = sorted(held_out_pairs())

    def share_right(shapes: list[str], keys: list[str]) -> float:
        found = [
            tasks.sum_record(rng, pairs, rng.choice(shapes), rng.choice(keys)) for _ in range(count)
        ]
        prompts = [model.chat(task.question) for task in found]
        replies = model.reply(prompts, [tasks.schema_of(task.fields) for task in found])
        return _share(list(map(parsed, replies)), [task.fields for task in found])

    return {
        "sums in JSON": share_right(tasks.SEEN_SHAPES, tasks.TOTAL_KEYS),
        "sums in JSON, unseen names": share_right(["sum"], tasks.UNSEEN_KEYS),
        "sums in JSON, unseen shapes": share_right(tasks.UNSEEN_SHAPES, tasks.TOTAL_KEYS),
    }


def calls(model: DemoModel, rng: random.Random, count: int) -> dict[str, float]:
    """The shares of questions for which the model calls the right one of two functions with the
    right arguments, in its own format or in a list of calls that a grammar enforces."""
    pairs, families = sorted(held_out_pairs()), list(tasks.UNSEEN_FUNCTIONS)
    figures: dict[str, float] = {}
    for names in ("usual", "unseen"):
        offers = []
        for _ in range(count):
            offer = [tasks.any_call(rng, pairs, family) for family in rng.sample(families, 2)]
            offers.append(offer if names == "usual" else list(map(tasks.unseen, offer)))
        asked = [rng.choice(offer) for offer in offers]
        prompts = [
            tools_prompt([each.tool for each in offer]) + turn(task.question)[0]
            for offer, task in zip(offers, asked, strict=True)
        ]
        free = model.reply(prompts)
        required = model.reply(prompts, list(map(tasks.schema_of_calls, offers)))
        figures[f"calls, {names} names"] = _share(free, [task.call_text for task in asked])
        figures[f"required calls, {names} names"] = _share(
            list(map(parsed, required)), [[task.required_call] for task in asked]
        )
    return figures


def texts(model: DemoModel, rng: random.Random, count: int) -> dict[str, float]:
    """The share of facts that are told word for word, and shares of stories that are sampled."""
    facts = [(question, answer) for questions, answer in FACTS for question in questions]
    facts = rng.sample(facts, min(count, len(facts)))
    asked = [model.chat(question) for question, _ in facts]
    animals = [rng.choice(ANIMALS) for _ in range(count)]
    prompts = [model.chat(f"Tell me a story about a {animal}.") for animal in animals]
    stories = model.reply(prompts, greedy=False)
    told = [
        f" {animal} " in story and share_of_grammatical_text(story) == 1
        for animal, story in zip(animals, stories, strict=True)
    ]
    return {
        "facts": _share(model.reply(asked), [answer for _, answer in facts]),
        "stories about the animal, of grammar only": sum(told) / count,
    }


def evaluate(directory: Path, seed: int = 0, sample: int = 100) -> str:
    """Evaluates the model in `directory`, with `sample` prompts for a figure; returns a report."""
    torch.manual_seed(seed)
    model, rng = DemoModel(directory), random.Random(seed)
    figures: dict[str, float] = {}
    for ability in (sums, records, calls, texts):
        figures |= ability(model, rng, sample)
    figures["replies that end by themselves"] = sum(model.ended) / len(model.ended)
    return "\n".join(f"{name:44}{share:8.1%}" for name, share in figures.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample", type=int, default=100, help="prompts per figure, %(default)s")
    print(evaluate(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
