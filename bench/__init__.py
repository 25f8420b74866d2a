"""Benchmarks of the stack through its public API. What the figures mean: docs/benchmarks.md."""
