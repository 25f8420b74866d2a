"""Triton's kernels run in its interpreter in tests, on CPU tensors: there is no GPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

# Triton reads it when it is imported, which torch does too: before anything else, therefore.
os.environ.setdefault("TRITON_INTERPRET", "1")

from triton.runtime import interpreter

_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_and_index(tensor: Any, scope: Any) -> None:
    """Lets the bounds of a `range` come from memory: Triton 3.6 calls `int` on an array of one
    element, which NumPy 2.4 refuses (triton-lang/triton#9171, fixed in later releases)."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _patch_tensor_and_index


# With `-n 2 --dist loadgroup` these run one after another, beside the others: stacks of processes
# that are harmed, with time limits of their own.
_HARMED = {"chaos", "faults", "fuzz"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.relative_to(Path(__file__).parent).parts[0] in _HARMED:
            item.add_marker(pytest.mark.xdist_group("harmed"))
