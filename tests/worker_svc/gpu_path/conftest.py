from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker_svc.device import ON_GPU
from tests.worker_svc.gpu_path.flash_attention import FlashAttention3Ops, install_flash_attn
from tests.worker_svc.gpu_path.small_model import (
    LARGER,
    LARGER_DTYPE,
    MAX_NUM_SEQS,
    NUM_BLOCKS,
    SMALL,
    VOCAB,
    decode,
    make_runner,
)
from tests.worker_svc.harness import Batch, limits, save_model, worker_settings
from tests.worker_svc.platforms import Uncaptured
from worker_svc.model_runner import ModelRunner


@pytest.fixture(scope="session")
def small_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small")
    save_model(path, **SMALL)
    return path


@pytest.fixture(scope="session")
def tokens(small_dir: Path) -> list[list[int]]:
    """The tokens of `decode` on the CPU's path: other kernels, other layouts, the same random
    numbers. On a GPU, which rounds more, those of the same kernels launched one by one."""
    if ON_GPU:
        return decode(*make_runner(small_dir, Uncaptured, block_size=16))
    runner = ModelRunner(worker_settings(small_dir, max_num_seqs=MAX_NUM_SEQS))
    runner.configure(1, NUM_BLOCKS)
    return decode(runner, Batch(limits(vocab_size=VOCAB, num_blocks=NUM_BLOCKS)))


@pytest.fixture(scope="session")
def larger_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("larger")
    save_model(path, dtype=LARGER_DTYPE, **LARGER)
    return path


@pytest.fixture
def flash_attention_3() -> Iterator[FlashAttention3Ops]:
    ops = FlashAttention3Ops()
    yield ops
    ops.close()


@pytest.fixture
def flash_attention_2(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The name of its function, each time that it is called."""
    return install_flash_attn(monkeypatch)


@pytest.fixture
def libraries(request: pytest.FixtureRequest) -> None:
    """Installs stand-ins on a CPU."""
    if not ON_GPU:
        request.getfixturevalue("flash_attention_2")
        request.getfixturevalue("flash_attention_3")
