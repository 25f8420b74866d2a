"""Trains models/demo, a real but tiny Qwen3, on text that `tools/demo/corpus.py` writes.

    python -m tools.train_demo_model --out /tmp/demo

The training takes about half an hour on two CPU cores. With --quick, it takes a minute and the
model learns nothing.
"""

import argparse
import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm
from transformers import GenerationConfig, Qwen2Tokenizer, Qwen3Config, Qwen3ForCausalLM

from tools.demo.corpus import DOCUMENTS, Document, write_corpus
from tools.demo.tokenizer import END_OF_TEXT, IM_END, save_tokenizer, train_tokenizer
from tools.evaluate_demo_model import evaluate

Example = tuple[Tensor, Tensor]
"""A document's token ids [tokens], and whether each of them is learned."""


@dataclass(frozen=True)
class Recipe:
    """Settings of a training: its length, its text and its batches."""

    steps: int = 3000
    minutes: float = 60
    documents: int = DOCUMENTS
    batch_tokens: int = 2048
    # Attention costs less in short rows. Only long rows have room for a prompt with functions.
    row_lengths: tuple[int, ...] = (256, 256, 256, 512, 512, 1024, 1024, 1024)
    learning_rate: float = 3e-3
    warmup_steps: int = 60
    vocab_size: int = 1536


QUICK = Recipe(steps=20, documents=300, batch_tokens=1024)


def build_model(tokenizer: Qwen2Tokenizer, seed: int) -> Qwen3ForCausalLM:
    """Builds a model of two million parameters with all parts of a large Qwen3, GQA included."""
    torch.manual_seed(seed)
    vocab = tokenizer.get_vocab()
    end_of_turn, end_of_text = vocab[IM_END], vocab[END_OF_TEXT]
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        eos_token_id=end_of_turn,
        pad_token_id=end_of_text,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.6,
        eos_token_id=[end_of_turn, end_of_text],
        pad_token_id=end_of_text,
    )
    return model


def encode(documents: list[Document], tokenizer: Qwen2Tokenizer) -> list[Example]:
    """Encodes the documents piece by piece, as the server will receive them."""
    pieces = [piece for document in documents for piece in document.pieces]
    encoded = iter(tokenizer([text for text, _ in pieces])["input_ids"])
    examples = []
    for document in documents:
        ids: list[int] = []
        learned: list[bool] = []
        for _, is_learned in document.pieces:
            piece_ids = next(encoded)
            ids += piece_ids
            learned += [is_learned] * len(piece_ids)
        examples.append((torch.tensor(ids, dtype=torch.int32), torch.tensor(learned)))
    return examples


def pack(examples: list[Example], row_length: int, padding: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Packs whole examples into rows [row_length] of ids, and of whether they are learned.

    A row starts with the start of an example, as every prompt does. The examples in a row see each
    other, as in a long chat whose subject changes. An example goes into the first of a few open
    rows that has room. Examples longer than a row are left out.
    """
    open_rows: list[list[Example]] = []
    for example in examples:
        room = row_length - len(example[0])
        if room < 0:
            continue
        row = next((row for row in open_rows if _length(row) <= room), None)
        if row is None:
            row = []
            open_rows.append(row)
        row.append(example)
        if len(open_rows) > 16:
            yield _joined(open_rows.pop(0), row_length, padding)


def _length(row: list[Example]) -> int:
    return sum(len(ids) for ids, _ in row)


def _joined(row: list[Example], length: int, padding: int) -> tuple[Tensor, Tensor]:
    ids = torch.full((length,), padding)
    learned = torch.zeros(length, dtype=torch.bool)
    ids[: _length(row)] = torch.cat([ids for ids, _ in row])
    learned[: _length(row)] = torch.cat([learned for _, learned in row])
    return ids, learned


def _rows_forever(
    examples: list[Example], length: int, padding: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    for epoch in itertools.count():
        shuffled = examples[:]
        random.Random(f"{seed}/{length}/{epoch}").shuffle(shuffled)
        yield from pack(shuffled, length, padding)


def batches(
    examples: list[Example], recipe: Recipe, padding: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields endless batches [batch_tokens // length, length]: ids, and whether to learn each."""
    rng = random.Random(seed)
    rows = {length: _rows_forever(examples, length, padding, seed) for length in recipe.row_lengths}
    while True:
        length = rng.choice(recipe.row_lengths)
        batch = list(itertools.islice(rows[length], recipe.batch_tokens // length))
        ids, learned = zip(*batch, strict=True)
        yield torch.stack(ids), torch.stack(learned)


def loss_of(model: Qwen3ForCausalLM, ids: Tensor, learned: Tensor) -> Tensor:
    """Mean cross entropy of the learned tokens; computes only the logits of these tokens."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    targets = learned[:, 1:]
    return F.cross_entropy(model.lm_head(hidden[:, :-1][targets]), ids[:, 1:][targets])


def train(
    model: Qwen3ForCausalLM, examples: list[Example], recipe: Recipe, padding: int, seed: int
) -> None:
    """Trains matrices with Muon and the rest with AdamW; the learning rate falls linearly to zero.

    Ends after `recipe.steps` steps or `recipe.minutes` minutes, whichever comes first.
    """
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    optimizers = [
        # Its steps have the size of AdamW's, so that both share a learning rate.
        torch.optim.Muon(
            matrices,
            recipe.learning_rate,
            weight_decay=0.01,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(others, recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.01),
    ]
    model.train()
    data = batches(examples, recipe, padding, seed)
    start = time.monotonic()
    progress = tqdm(range(recipe.steps), desc="train", mininterval=10)
    for step in progress:
        done = max(step / recipe.steps, (time.monotonic() - start) / 60 / recipe.minutes)
        if done >= 1:
            break
        rate = min((step + 1) / recipe.warmup_steps, 1) * (1 - done)
        loss = loss_of(model, *next(data))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = rate * recipe.learning_rate
            optimizer.step()
            optimizer.zero_grad()
        if step % 20 == 0:
            progress.set_postfix(loss=f"{loss.item():.4f}", refresh=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to write the model to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start-from", type=Path, help="directory of a model to train further")
    parser.add_argument(
        "--keep",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="weight of --start-from in the written average",
    )
    parser.add_argument("--steps", type=int, help=f"optimizer steps, default {Recipe.steps}")
    parser.add_argument("--minutes", type=float, help="maximum minutes, default 60")
    parser.add_argument("--learning-rate", type=float, help="initial learning rate, default 0.003")
    parser.add_argument("--quick", action="store_true", help="a smoke test that learns nothing")
    args = parser.parse_args()
    recipe = QUICK if args.quick else Recipe()
    if args.steps is not None:
        recipe = replace(recipe, steps=args.steps)
    if args.minutes is not None:
        recipe = replace(recipe, minutes=args.minutes)
    if args.learning_rate is not None:
        recipe = replace(recipe, learning_rate=args.learning_rate)

    start = time.monotonic()
    documents = write_corpus(recipe.documents, args.seed)
    if args.start_from is None:
        tokenizer = train_tokenizer((document.text for document in documents), recipe.vocab_size)
        model = build_model(tokenizer, args.seed)
    else:
        tokenizer = Qwen2Tokenizer.from_pretrained(args.start_from)
        model = Qwen3ForCausalLM.from_pretrained(args.start_from, dtype=torch.float32)
    examples = encode(documents, tokenizer)
    before = [weight.detach().clone() for weight in model.parameters()]
    train(model, examples, recipe, tokenizer.get_vocab()[END_OF_TEXT], args.seed)
    # Averages keep more of the model's earlier abilities (Model soups, arXiv 2203.05482).
    for weight, old in zip(model.parameters(), before, strict=True):
        weight.data.lerp_(old, args.keep)
    args.out.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, args.out)
    model.bfloat16().save_pretrained(args.out)
    # The file is small in bfloat16. The model runs in float32, in which all ways to compute a token
    # give the same token.
    model.config.dtype = torch.float32
    model.config.save_pretrained(args.out)
    (args.out / "model.safetensors").chmod(0o644)  # only its owner could read the file
    print(f"trained in {(time.monotonic() - start) / 60:.1f} minutes, written to {args.out}")
    print(evaluate(args.out, args.seed, sample=20 if args.quick else None))


if __name__ == "__main__":
    main()
