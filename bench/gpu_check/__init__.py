"""`make gpu-check`: proves and measures the worker on a GPU. What it does: docs/gpu-check.md."""
