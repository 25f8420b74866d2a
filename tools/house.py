"""`python -m tools.house`, a part of `make check`: fails if the code exceeds the limits of
`[tool.house]` in pyproject.toml. The exceptions and their reasons are there, too."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def problems(root: Path, house: dict[str, Any]) -> Iterator[str]:
    """Yields a line for each file, function or class over a limit and each needless exception."""
    unused = {(rule, name) for rule, names in house["exceptions"].items() for name in names}

    def excepted(rule: str, name: str) -> bool:
        prefixes = house["exceptions"].get(rule, {})
        found = {(rule, each) for each in prefixes if name.startswith(each)}
        unused.difference_update(found)
        return bool(found)

    files = [path for path in _tracked(root) if path.parts[0] in house["folders"]]
    totals = Counter[str]()  # lines of Python, by top-level folder
    for path in files:
        text = (root / path).read_text(encoding="utf-8")
        lines = text.count("\n")
        if lines > house["file_lines"] and not excepted("file_lines", str(path)):
            yield f"{path}: {lines} lines; at most {house['file_lines']}"
        if path.suffix == ".py":
            totals[path.parts[0]] += lines
        for line, name, length in _functions(text) if path.suffix == ".py" else ():
            if length > house["function_lines"] and not excepted("function_lines", str(path)):
                yield f"{path}:{line}: {name} has {length} lines; at most {house['function_lines']}"
        for number, line_text in enumerate(text.splitlines(), 1):
            for word, instead in house["words"].items():
                if re.search(rf"(?i)(?<![a-z]){word}(?![a-z])", line_text):
                    yield f"{path}:{number}: {word}: write {instead}"
    modules = [path for path in files if path.suffix == ".py" and path.name != "__init__.py"]
    folders = Counter(path.parent for path in modules)
    for folder, count in folders.items():
        if count > house["modules"] and not excepted("modules", str(folder)):
            yield f"{folder}: {count} modules side by side; at most {house['modules']}"
    for group in house["totals"]:
        total = sum(totals[folder] for folder in group["folders"])
        if total > group["lines"]:
            names = ", ".join(group["folders"])
            yield f"{names}: {total} lines of Python in all; at most {group['lines']}"
    for name, most in house["fields"].items():
        path, _, class_name = name.partition(":")
        count = _num_fields((root / path).read_text(encoding="utf-8"), class_name)
        if count > most:
            yield f"{path}: {class_name} has {count} fields; at most {most}"
    for rule, name in sorted(unused):
        yield f"pyproject.toml: the exception {rule} of {name} is not needed"


def _tracked(root: Path) -> list[Path]:
    """The tracked Python and C++ files that exist, without generated stubs."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py", "*.cpp", "*.h"],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    )
    paths = [Path(line) for line in listed.stdout.splitlines()]
    return [path for path in paths if "pb" not in path.parts and (root / path).exists()]


def _functions(text: str) -> Iterator[tuple[int, str, int]]:
    """Yields the first line, the name and the number of lines of each function."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno
            yield node.lineno, node.name, node.end_lineno - node.lineno + 1


def _num_fields(text: str, class_name: str) -> int:
    """The number of attributes that a class's methods assign, or of its annotated fields."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            for each in ast.walk(node):
                match each:
                    case ast.AnnAssign(ast.Name(name)):
                        names.add(name)
                    case ast.Attribute(ast.Name("self"), name, ast.Store()):
                        names.add(name)
    return len(names)


def main() -> int:
    house = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["house"]
    found = list(problems(ROOT, house))
    print("\n".join(found) or "the code is within the limits of [tool.house]")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
