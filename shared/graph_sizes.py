"""The sizes to which steps with prompts are padded, so that a GPU repeats few CUDA graphs."""

from __future__ import annotations

from typing import NamedTuple

_DECODES = (0, 64, 256)  # and the maximum
NUM_PROMPTS = 16
_MIN_TOKENS = 64


class GraphSize(NamedTuple):
    """The size of a padded step. With prompts, it has more tokens than rows."""

    decodes: int  # rows of one token
    prompts: int  # rows of several tokens or of none
    tokens: int  # of the prompts


def graph_size(
    decodes: int, prompts: int, tokens: int, max_num_seqs: int, max_tokens: int
) -> GraphSize | None:
    """The smallest size for a step with prompts, or None if there is none.

    Args:
        decodes: rows of one token.
        prompts: rows of several tokens; a size has room for one more, which stays without tokens.
        tokens: of the prompts.
        max_num_seqs: the maximum of rows in a step.
        max_tokens: the maximum of `tokens` in a graph. Up to `NUM_PROMPTS`, there is none.
    """
    if not 0 < prompts < NUM_PROMPTS or tokens > max_tokens or decodes > max_num_seqs:
        return None
    if max_tokens <= NUM_PROMPTS:
        return None
    rows = next((each for each in _DECODES if decodes <= each < max_num_seqs), max_num_seqs)
    return GraphSize(
        rows, NUM_PROMPTS, next(each for each in token_sizes(max_tokens) if each >= tokens)
    )


def token_sizes(max_tokens: int) -> list[int]:
    """The numbers of prompt tokens in graphs: 64, 96, 128, 192, ..., two per doubling, and
    `max_tokens`."""
    sizes, size = [], _MIN_TOKENS
    while size < max_tokens:
        sizes += [size, size * 3 // 2]
        size *= 2
    return [each for each in sizes if each < max_tokens] + [max_tokens]
