"""Runs Triton's kernels in its interpreter, on CPU tensors, unless TEST_DEVICE is cuda: then
`tests.worker_svc.device` puts tensors on a GPU, and the kernels are compiled."""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import sys
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.certificates import Authority
from worker_svc.kernels.cpu.build import PREBUILT, CompilerError, build, choose_variant

ON_GPU = os.environ.get("TEST_DEVICE") == "cuda"

if not ON_GPU:
    # Before any other import: Triton reads this when it is imported, by torch for one.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "of random cases; `random`: another for each, and no other tests"
    parser.addoption("--seed", default="1", help=text)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of a test's random cases. It is printed, so that a failure shows it."""
    given = request.config.getoption("--seed")
    number = secrets.randbits(32) if given == "random" else int(given)
    print(f"--seed={number}")
    return number


def pytest_configure() -> None:
    """Stops a run meant for a GPU from passing without one; lets processes be interrupted."""
    device = os.environ.get("TEST_DEVICE", "cpu")
    if device not in ("cpu", "cuda"):
        raise pytest.UsageError(f"TEST_DEVICE: {device}; must be cpu or cuda")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # As in a background job of a shell: processes of tests would ignore Ctrl-C, too.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not ON_GPU:
        with suppress(CompilerError, OSError):  # the tests that need the kernels will fail
            # Now, because stacks with a cache directory of their own would compile them again.
            build(PREBUILT, [choose_variant()])
        return
    import torch
    import triton

    if triton.knobs.runtime.interpret:
        raise pytest.UsageError("TEST_DEVICE is cuda, but TRITON_INTERPRET is set")
    if not torch.cuda.is_available():
        raise pytest.UsageError("TEST_DEVICE is cuda, but torch finds no CUDA device")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for a module's certificates."""
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def authority(certificates: Path) -> Authority:
    return Authority(certificates, "ours")


@pytest.hookimpl(optionalhook=True)  # a GPU machine may lack pytest-xdist
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Turns `-n auto`, which `make test` passes, into a worker per processor, but none if tests are
    named: workers take longer to start than most tests to run."""
    if number := os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return int(number)
    named = config.option.keyword or not all(Path(each).is_dir() for each in config.args)
    return 0 if named else len(os.sched_getaffinity(0))


# All tests in these folders are of the system; single modules elsewhere are marked.
_SYSTEM = [Path(__file__).parent / name for name in ("abuse", "e2e", "faults", "fuzz", "http")]
_TIMEOUT_S = 600  # of a test with a stack, what the stack needs to start included
_LOG_SIZES = pytest.StashKey[dict[Path, dict[str, int]]]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks tests of the system."""
    if config.getoption("--seed") == "random":
        items[:] = [item for item in items if "seed" in getattr(item, "fixturenames", ())]
    for item in items:
        if any(item.path.is_relative_to(folder) for folder in _SYSTEM):
            item.add_marker(pytest.mark.system)
        if item.get_closest_marker("system") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(_TIMEOUT_S))


def _running_stacks() -> list[Any]:
    stacks = sys.modules.get("tests.stack")
    return stacks.running if stacks else []


def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_LOG_SIZES] = {each.directory: each.log_sizes() for each in _running_stacks()}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Adds to a failure what the stacks have logged since the test began, and how to repeat it."""
    report = yield
    if report.failed:
        sizes = item.stash.get(_LOG_SIZES, {})
        for stack in _running_stacks():
            logs = stack.describe(sizes.get(stack.directory))
            report.sections.append((f"the stack at {stack.address}", logs))
        command = f".venv/bin/python -m pytest {shlex.quote(item.nodeid)}"
        report.sections.append(("this test alone", command))
    return report
