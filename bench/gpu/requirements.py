"""Finds the packages and versions that the check needs, with the standard library alone."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version

from bench.gpu.modules import ROOT

PROJECT = "nano-vllm-grpc"
EXTRAS = ("worker", "frontend", "scheduler", "stack")
TESTS = ("pytest", "packaging")  # the first is in the extra for development
# Packages that the check does not import: for grammars, plots, the chat, HTTP, the dashboard,
# traces, and a worker on a CPU.
UNUSED = (
    "matplotlib",
    "numba",
    "opentelemetry-exporter-otlp-proto-grpc",
    "opentelemetry-sdk",
    "prompt-toolkit",
    "smg",
    "smg-grpc-proto",
    "starlette",
    "uvicorn",
    "xgrammar",
)


def requirements() -> dict[str, list[str]]:
    """The version specifiers by package, from the extras and the generated stubs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    needed: dict[str, list[str]] = {}

    def add(lines: Sequence[str]) -> None:
        for line in lines:
            name, brackets, specifiers = _split(line)
            if name == PROJECT:
                for extra in brackets:
                    add(extras[extra])
            elif name not in UNUSED:
                wanted = needed.setdefault(name, [])
                wanted += [each for each in specifiers if each not in wanted]

    add(project["dependencies"])
    add([f"{PROJECT}[{','.join(EXTRAS)}]"])
    # Without upper bounds, which are there for the tests' other plugins.
    add([re.sub(",?<[^,;]*", "", line) for line in extras["dev"] if _split(line)[0] in TESTS])
    add([*TESTS, *_stubs_need()])
    return needed


def satisfies(installed: str, specifier: str) -> bool:
    """Whether a version satisfies a specifier such as `>=2.8` or `~=3.1`."""
    try:
        from packaging.specifiers import SpecifierSet
    except ImportError:  # reported as missing, but not needed here
        operator, wanted = re.match(r"([<>=~!]*)(.*)", specifier).groups()  # type: ignore[union-attr]
        return operator not in (">=", "~=") or numbers(installed) >= numbers(wanted)
    return SpecifierSet(specifier).contains(installed, prereleases=True)


def numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:3]))


def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _split(line: str) -> tuple[str, list[str], list[str]]:
    """Splits `name[a,b]>=1,<2` into the name, the extras and the version specifiers."""
    match = re.match(r"([\w.-]+)\s*(?:\[([^\]]*)\])?\s*([^;]*)", line)
    assert match is not None
    name, brackets, specifiers = match.groups(default="")
    return name, re.findall(r"[\w-]+", brackets), re.findall(r"[^\s,]+", specifiers)


def _stubs_need() -> Iterator[str]:
    """Yields the runtimes, in the versions that the generated code demands on import."""
    for path in sorted((ROOT / "shared" / "pb").glob("*_pb2*.py")):
        text = path.read_text(encoding="utf-8")
        if match := re.search(r"^# Protobuf Python Version: (\S+)", text, re.MULTILINE):
            yield f"protobuf>={match[1]}"
        if match := re.search(r"^GRPC_GENERATED_VERSION = '(\S+)'", text, re.MULTILINE):
            yield f"grpcio>={match[1]}"
