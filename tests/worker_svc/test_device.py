"""A run that was meant to prove something on a GPU must not pass without one."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from triton.runtime import interpreter

from tests.worker_svc.device import cpu_only
from tests.worker_svc.kernels.triton.conftest import pytest_pyfunc_call
from worker_svc.kernels.triton.rms_norm import rms_norm

pytestmark = cpu_only

CONFTEST = Path(__file__).parents[1] / "conftest.py"


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"TEST_DEVICE": "cuda", "TRITON_INTERPRET": "1"}, "TRITON_INTERPRET is set"),
        ({"TEST_DEVICE": "cuda", "TRITON_INTERPRET": "0"}, "torch finds no CUDA device"),
        ({"TEST_DEVICE": "gpu"}, "TEST_DEVICE: gpu; must be cpu or cuda"),
    ],
)
def test_without_a_gpu_nothing_passes(
    environment: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The conftest, as a new pytest would read it, ends that with a usage error."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    # Reading the conftest patches it again.
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", interpreter._patch_lang_tensor)
    spec = spec_from_file_location("conftest_of_a_new_pytest", CONFTEST)
    assert spec
    assert spec.loader
    conftest = module_from_spec(spec)
    spec.loader.exec_module(conftest)
    with pytest.raises(pytest.UsageError, match=reason):
        conftest.pytest_configure()


def launch() -> None:
    rms_norm(torch.ones(1, 4), torch.ones(4), 1e-6)


def forget() -> None:
    pass


def run(test: Callable[[], None], launches_nothing: bool) -> None:
    """Runs `test` within the hook around the tests of kernels.

    Raises:
        AssertionError: by that, the test fails.
    """
    marker = "launches_nothing" if launches_nothing else ""
    item = SimpleNamespace(get_closest_marker=lambda name: name == marker)
    hook = pytest_pyfunc_call(cast(Any, item))
    next(hook)
    test()
    with pytest.raises(StopIteration):
        hook.send(None)


def test_kernel_tests_without_kernels_fail() -> None:
    run(launch, launches_nothing=False)
    run(forget, launches_nothing=True)
    with pytest.raises(AssertionError, match="no kernel was launched"):
        run(forget, launches_nothing=False)
    with pytest.raises(AssertionError, match="marked launches_nothing, but it launched"):
        run(launch, launches_nothing=True)
