"""`make gpu-check`: proves and measures the worker on this machine's GPU. See
docs/deploy/gpu-and-nodes.md."""
