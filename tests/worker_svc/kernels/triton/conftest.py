"""Fails tests of kernels that launch none, unless they are marked: they prove nothing."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import triton

from tests.worker_svc.device import ON_GPU


@contextmanager
def launches() -> Iterator[list[str]]:
    """The names of the kernels launched meanwhile; on a GPU only compiled ones, which alone call
    Triton's hook."""
    names: list[str] = []
    if ON_GPU:
        hooks = triton.knobs.runtime.launch_enter_hook

        def note(metadata: Any) -> None:
            names.append(metadata.get()["name"])

        hooks.add(note)
        try:
            yield names
        finally:
            hooks.remove(note)
    else:
        from triton.runtime.interpreter import InterpretedFunction

        run = InterpretedFunction.run

        def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            names.append(self.__name__)
            return run(self, *args, **kwargs)

        with patch.object(InterpretedFunction, "run", noted):
            yield names


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    with launches() as names:
        result = yield
    if pyfuncitem.get_closest_marker("launches_nothing"):
        assert not names, f"marked launches_nothing, but it launched {set(names)}"
    else:
        assert names, "no kernel was launched"
    return result
