from __future__ import annotations

import random

import pytest

from bench.errors import BenchError
from bench.workload import Request, Shape, check_fits, reference_workload, warm_up_request

SCALED = Shape(num_seqs=32, min_input=32, max_input=256, min_output=32, max_output=256)


@pytest.mark.parametrize(("shape", "total"), [(Shape(), 133_966), (SCALED, 4_975)])
def test_output_tokens_of_the_reference_workloads(shape: Shape, total: int) -> None:
    assert sum(r.output_len for r in reference_workload(shape, 151_936)) == total


def test_it_is_the_workload_of_nano_vllm() -> None:
    # The two statements of nano-vLLM's bench.py, with the global generator, as there.
    random.seed(0)
    prompts = [
        [random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(256)
    ]
    lengths = [random.randint(100, 1024) for _ in range(256)]

    ours = reference_workload(Shape(), 151_936)

    assert [r.prompt for r in ours] == prompts
    assert [r.output_len for r in ours] == lengths


def test_a_small_vocabulary_changes_the_ids_and_not_the_lengths() -> None:
    small, large = reference_workload(SCALED, 1536), reference_workload(SCALED, 151_936)
    assert max(max(r.prompt) for r in small) < 1536
    assert [(len(r.prompt), r.output_len) for r in small] == [
        (len(r.prompt), r.output_len) for r in large
    ]


def test_another_seed_is_another_workload() -> None:
    assert reference_workload(SCALED, 1536) != reference_workload(
        Shape(32, 32, 256, 32, 256, seed=1), 1536
    )


def test_the_warm_up_shares_no_prefix() -> None:
    warm_up = warm_up_request(SCALED, 1536)
    assert all(r.prompt[:4] != warm_up.prompt[:4] for r in reference_workload(SCALED, 1536))


def test_too_long_for_the_model_names_the_flags() -> None:
    requests = [Request([1] * 30, 10, 0), Request([1] * 20, 21, 0)]
    check_fits(requests, 41)
    with pytest.raises(BenchError, match=r"41 tokens.*takes 40.*--max-input or --max-output"):
        check_fits(requests, 40)
