"""Runs the functions of a module whose names begin with `check_`, in the environment of others'
clients, and prints how each ended: `python checks.py MODULE JSON`, where JSON is what they get."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import TypeAdapter

Value = TypeVar("Value")


def refusal_of(kind: type[Exception], call: Callable[[], object]) -> str:
    """The message of the error that `call` raises, which must be of this kind."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError("it was taken")


def valid(value: Value) -> Value:
    """Returns an object of a client's package, which must have all that its type requires.

    The packages themselves take whatever a server sends.
    """
    sent: Any = value
    TypeAdapter(type(value)).validate_python(sent.to_dict(mode="json"))
    return value


def main() -> None:
    module, given = importlib.import_module(sys.argv[1]), json.loads(sys.argv[2])
    ends = {}
    for name, check in inspect.getmembers(module, inspect.isfunction):
        if name.startswith("check_"):
            try:
                check(given)
                ends[name] = ""
            except Exception:
                ends[name] = traceback.format_exc()
    print(json.dumps(ends))


if __name__ == "__main__":
    main()
