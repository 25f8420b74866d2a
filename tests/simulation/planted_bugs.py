"""Bugs that somebody might write, read from `planted_bugs.txt`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Bug:
    name: str
    world: str  # the simulation that is to find it
    file: str
    removed: list[str] = field(default_factory=list)  # lines, of which the ends may be cut off
    added: list[str] = field(default_factory=list)

    def plant(self, root: Path) -> None:
        """Plants the bug in a copy of the code.

        Raises:
            LookupError: the text to replace does not occur exactly once.
        """
        path, removed = root / self.file, "\n".join(self.removed)
        text = path.read_text()
        if text.count(removed) != 1:
            raise LookupError(f"{self.name}: {text.count(removed)} times in {path}:\n{removed}")
        path.write_text(text.replace(removed, "\n".join(self.added)))


def _read(path: Path) -> dict[str, Bug]:
    bugs: list[Bug] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        match line[:1]:
            case "" | "#":
                pass
            case "@":
                _, world, file = line.split()
            case "-":
                bugs[-1].removed.append(line[1:])
            case "+":
                bugs[-1].added.append(line[1:])
            case _:
                bugs.append(Bug(line, world, file))
    return {bug.name: bug for bug in bugs}


BUGS = _read(Path(__file__).with_suffix(".txt"))
