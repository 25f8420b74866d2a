"""Formats of answers: reasoning and tool calls in the text of a model."""
