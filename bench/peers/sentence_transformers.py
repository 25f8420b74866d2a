"""Embeds texts with sentence-transformers, by PyTorch or OpenVINO, in its own environment.

Each line of stdin is a JSON list of texts; the answer is a line with the seconds and the vectors.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import version

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

PACKAGES = ("sentence-transformers", "transformers", "torch", "openvino", "optimum-intel")


def main(model: str, backend: str, batch_size: int) -> None:
    stdout = os.dup(1)
    os.dup2(2, 1)  # all other output goes to stderr
    arguments = {"dtype": "float32"} if backend == "torch" else {}
    transformer = Transformer(  # which would render texts as chats if it could choose
        model,
        backend=backend,
        model_kwargs=arguments,
        modality_config={"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
        module_output_name="token_embeddings",
    )
    pooling = Pooling(transformer.get_embedding_dimension(), pooling_mode="lasttoken")
    encoder = SentenceTransformer(modules=[transformer, pooling, Normalize()], device="cpu")
    os.write(stdout, (json.dumps({each: version(each) for each in PACKAGES}) + "\n").encode())
    for line in sys.stdin:
        start = time.perf_counter()
        vectors = encoder.encode(json.loads(line), batch_size=batch_size)
        seconds = time.perf_counter() - start
        os.write(stdout, (json.dumps([seconds, vectors.tolist()]) + "\n").encode())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
