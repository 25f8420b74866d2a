"""Padded steps equal exact ones."""

from __future__ import annotations

from tests.worker_svc.random_steps import compare


def test_random_mixtures() -> None:
    assert compare(200, seed=1) > 100
