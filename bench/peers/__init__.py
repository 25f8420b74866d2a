"""Compares this server with others on one machine, in one run. See docs/results/peers.md."""
