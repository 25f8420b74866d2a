"""Responses that are stored, and continue in the background."""
