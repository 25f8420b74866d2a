"""Changes JSON values in ways that keep most of their shape."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

_EDGES = json.loads(
    r"""[null, true, false, 0, -1, 1, 2, 0.5, -0.0, 1e308, NaN, Infinity,
    2147483648, 4294967296, 9223372036854775808, -9223372036854775808, 1000000000000000000000000,
    "", "a", "\u0000", "\ud800", "\ud83e\udd37\u0300", "<|im_end|>", "((((",
    [], {}, [[]], [null], {"": {}}]"""
)
_EDGES.append("a" * 3000)
_DEEP = (1, 50, 127, 128, 300)


def twist(value: Any, rng: random.Random) -> Any:
    """A copy with one to three places changed: another value, none, two of it, or one too many."""
    root = [copy.deepcopy(value)]
    for _ in range(rng.choice((1, 1, 2, 3))):
        container, key = rng.choice(list(_places(root)))
        match rng.randrange(8):
            case 0 if container is not root:
                del container[key]
            case 1 if isinstance(container, list) and container is not root:
                container[key:key] = [container[key]] * rng.choice((1, 9, 300))
            case 2 if isinstance(container, dict):
                container[rng.choice(("", "extra", "role", "$ref", "__proto__"))] = _draw(rng)
            case 3:
                container[key] = [container[key]]
            case 4 if isinstance(container[key], str):
                container[key] = container[key] * rng.choice((2, 100))
            case _:
                container[key] = _draw(rng)
    return root[0]


def _draw(rng: random.Random) -> Any:
    value: Any = copy.deepcopy(rng.choice(_EDGES))  # further twists may change it
    if rng.random() < 0.9:
        return value
    for _ in range(rng.choice(_DEEP)):
        value = [value] if rng.random() < 0.5 else {"items": value}
    return value


def _places(container: Any) -> Iterator[tuple[Any, Any]]:
    """Every list or object within, with each of its indexes or keys."""
    if isinstance(container, (list, dict)):
        for key in container if isinstance(container, dict) else range(len(container)):
            yield container, key
            yield from _places(container[key])
