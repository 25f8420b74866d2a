"""Benchmarks of the stack through its public API. docs/benchmarks.md explains the figures."""
