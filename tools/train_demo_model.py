"""Trains a model like models/demo, with its tokenizer and shape, on text that `tools/demo` writes.

    python -m tools.train_demo_model --out /tmp/demo

The training takes about half an hour on two CPU cores. With `--steps 20 --documents 300`, it takes
a minute and the model learns nothing.
"""

import argparse
import random
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import Qwen3Config, Qwen3ForCausalLM

from tools.demo.corpus import TOKENIZER, Document, write_corpus
from tools.evaluate_demo_model import evaluate
from tools.make_model import DEMO_MODEL

BATCH_ROWS = 8
LEARNING_RATE = 3e-3
WARMUP_STEPS = 60

Example = tuple[Tensor, Tensor]
"""Token ids [tokens], and whether each of them is learned."""


def encode(document: Document) -> Example:
    """Encodes a document piece by piece, as the server will receive them."""
    ids: list[int] = []
    learned: list[bool] = []
    for text, is_learned in document:
        piece = TOKENIZER(text)["input_ids"]
        ids += piece
        learned += [is_learned] * len(piece)
    return torch.tensor(ids), torch.tensor(learned)


def batch(examples: list[Example], rng: random.Random) -> Example:
    """Draws a batch [BATCH_ROWS, tokens] of examples of similar length: less to pad."""
    start = rng.randrange(len(examples) - BATCH_ROWS)
    ids, learned = zip(*examples[start : start + BATCH_ROWS], strict=True)
    padding = TOKENIZER.pad_token_id
    return pad_sequence([*ids], True, padding), pad_sequence([*learned], True, False)


def loss_of(model: Any, ids: Tensor, learned: Tensor) -> Tensor:
    """Mean cross entropy of the learned tokens; computes only the logits of these tokens."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    targets = learned[:, 1:]
    return F.cross_entropy(model.lm_head(hidden[:, :-1][targets]), ids[:, 1:][targets])


def train(model: Any, examples: list[Example], steps: int, seed: int) -> None:
    """Trains matrices with Muon, the rest with AdamW; the learning rate falls linearly to zero."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    optimizers = [
        # Its steps have the size of AdamW's, so that both share a learning rate.
        torch.optim.Muon(matrices, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.01),
    ]
    rng = random.Random(seed)
    progress = tqdm(range(steps), desc="train", mininterval=10)
    for step in progress:
        loss = loss_of(model, *batch(examples, rng))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = LEARNING_RATE * min((step + 1) / WARMUP_STEPS, 1) * (1 - step / steps)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
        if step % 20 == 0:
            progress.set_postfix(loss=f"{loss.item():.4f}", refresh=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to write the model to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=3000, help="optimizer steps, %(default)s")
    parser.add_argument("--documents", type=int, default=50_000, help="to read, %(default)s")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model = Qwen3ForCausalLM(Qwen3Config.from_pretrained(DEMO_MODEL)).float()
    examples = [encode(document) for document in write_corpus(args.documents, args.seed)]
    examples.sort(key=lambda example: len(example[0]))
    train(model, examples, args.steps, args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    # The file is small in bfloat16. The model runs in float32, in which all ways to compute a token
    # give the same token, as the committed configuration says.
    model.bfloat16().save_pretrained(args.out)
    (args.out / "model.safetensors").chmod(0o644)  # only its owner could read the file
    for path in DEMO_MODEL.glob("*.json"):
        shutil.copy(path, args.out)
    print(evaluate(args.out, args.seed, sample=20))


if __name__ == "__main__":
    main()
