"""Reasons for which a worker cannot start; the message is what the operator reads.

StartError
└── ModelError   the model directory: unsupported configuration, unknown or missing weight
"""

from __future__ import annotations


class StartError(Exception):
    """The worker cannot run with these settings, however often it is restarted."""


class ModelError(StartError):
    """The model directory cannot be served; the message names what is wrong in it."""
