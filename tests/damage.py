"""Damages that a loss of power, a full disk or a bad disk does to a file."""

from __future__ import annotations

from pathlib import Path

import pytest


def cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 6 // 10])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def zeros_at_its_end(path: Path) -> None:
    data = path.read_bytes()
    kept = len(data) * 6 // 10
    path.write_bytes(data[:kept] + bytes(len(data) - kept))


def a_byte_flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


damages = pytest.mark.parametrize(
    "damage", [cut, emptied, zeros_at_its_end, a_byte_flipped, longer]
)
