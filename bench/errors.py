from __future__ import annotations


class BenchError(Exception):
    """The benchmark cannot be run as asked; the message says which flag to change."""
