"""The sizes to which steps with prompts are padded."""

from __future__ import annotations

import pytest

from shared.graph_sizes import NUM_PROMPTS, GraphSize, graph_size


@pytest.mark.parametrize("max_num_seqs", [1, 32, 64, 100, 256, 1024])
@pytest.mark.parametrize("max_tokens", [17, 64, 100, 4096])
def test_sizes_hold_their_steps_and_are_few(max_num_seqs: int, max_tokens: int) -> None:
    largest, sizes = GraphSize(max_num_seqs, NUM_PROMPTS, max_tokens), set()
    for tokens in range(2, max_tokens + 1):
        for decodes in {0, 1, 64, 65, max_num_seqs - 1, max_num_seqs}:
            if decodes > max_num_seqs:
                continue
            size = graph_size(decodes, 1, tokens, max_num_seqs, max_tokens)
            assert size
            assert decodes <= size.decodes <= max_num_seqs
            assert tokens <= size.tokens <= max(64, 1.5 * tokens)
            assert all(ours <= theirs for ours, theirs in zip(size, largest, strict=True))
            sizes.add(size)
    assert largest in sizes
    assert len(sizes) <= 4 * 14


@pytest.mark.parametrize(
    ("decodes", "prompts", "tokens"), [(3, 0, 0), (3, 1, 65), (3, NUM_PROMPTS, 64), (33, 1, 9)]
)
def test_no_size(decodes: int, prompts: int, tokens: int) -> None:
    """Without prompts, with too many tokens, prompts or decodes."""
    assert graph_size(3, NUM_PROMPTS - 1, 64, 32, 64)
    assert graph_size(decodes, prompts, tokens, 32, 64) is None


def test_without_graphs() -> None:
    for max_tokens in (0, NUM_PROMPTS):
        assert graph_size(0, 1, 2, 32, max_tokens) is None
