"""The corpus: cases that once did harm, or were feared to, replayed by every campaign.

A case is a text file, `corpus/SERVICE/NAME.txt`: a comment that says what it once did, the method,
and a line per message, in hex; `0a00*60000` repeats these bytes 60,000 times.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).parent / "corpus"


@dataclass(frozen=True)
class Case:
    """Messages to a method, in this order."""

    method: str
    messages: tuple[bytes, ...]

    def __str__(self) -> str:
        return " ".join([self.method, *(message.hex() for message in self.messages)])


def load_cases(service: str) -> list[Case]:
    """Reads all cases of a service, by name."""
    return [_parse(path.read_text("utf-8")) for path in sorted((_ROOT / service).glob("*.txt"))]


def save_case(service: str, case: Case, did: str) -> Path:
    """Keeps a case and what it did; returns the new file, to be given a better name."""
    text = f"# {' '.join(did.split())}\n{case.method}\n"
    text += "".join(f"{message.hex()}\n" for message in case.messages)
    path = _ROOT / service / f"new-{hashlib.sha256(text.encode()).hexdigest()[:8]}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _parse(text: str) -> Case:
    method, *messages = (line for line in text.splitlines() if not line.startswith("#"))
    return Case(method, tuple(map(_decode, messages)))


def _decode(line: str) -> bytes:
    message = bytearray()
    for word in line.split():
        unit, _, times = word.partition("*")
        message += bytes.fromhex(unit) * int(times or 1)
    return bytes(message)
