"""Kills processes of this server and of others under load. See docs/results/faults.md."""
