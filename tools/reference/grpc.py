"""The page of gRPC services and messages."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from tools.reference import markdown
from tools.reference.markdown import code, codes, described, paragraphs, prose
from tools.reference.protos import Contract, Definition, Part, contract

_INTERNAL = """This contract is internal. It is valid only between processes of one version, and it
may change in any commit."""


def page() -> str:
    return markdown.page(
        "gRPC API",
        "This page lists the services, messages and fields of the gRPC API, which clients of any "
        "language can call. The internal contracts between the services follow.",
        "Ranges and defaults of sampling parameters are in [sampling parameters](sampling.md), "
        "statuses in [errors](errors.md), and sizes in [limits](limits.md). "
        "The API is defined in [frontend.proto](../../protos/frontend.proto).",
        "\n\n".join(_sections("Public API", contract("frontend"))),
        "\n\n".join(_sections("Internal: scheduler", contract("scheduler"), _INTERNAL)),
        "\n\n".join(_sections("Internal: worker", contract("worker"), _INTERNAL)),
    )


def _sections(title: str, found: Contract, note: str = "") -> Iterator[str]:
    yield f"## {title}"
    yield paragraphs(found.comment)
    if note:
        yield prose(note)
    # Names of the internal contracts may occur in several contracts, so they have no links.
    known = set() if note else {each.name for each in found.types if each.parts}
    for service in found.services:
        yield f"### {service.name}"
        yield f"The full name is {code(f'{found.package}.{service.name}')}."
        rows = [_row(method, known) for method in service.parts]
        yield described(("Method", "Request", "Response", "Meaning"), rows)
    empty = [each.name for each in found.types if not each.parts]
    if empty:
        yield f"Messages without fields: {codes(empty)}."
    for each in found.types:
        if each.parts:
            yield from _type(each, known)


def _type(found: Definition, known: Collection[str]) -> Iterator[str]:
    yield f"### {found.name}"
    if found.comment:
        yield paragraphs(found.comment)
    yield from _choices(found)
    is_enum = not found.parts[0].types
    columns = ("Value", "Number") if is_enum else ("Field", "Number", "Type")
    rows = [_row(part, known, str(part.number)) for part in found.parts]
    yield described((*columns, "Meaning"), rows)


def _row(part: Part, known: Collection[str], *numbers: str) -> tuple[str, ...]:
    types = (_linked(each, known) for each in part.types)
    return code(part.name), *numbers, *types, prose(part.comment)


def _choices(found: Definition) -> Iterator[str]:
    for oneof in dict.fromkeys(part.oneof for part in found.parts if part.oneof):
        names = codes(part.name for part in found.parts if part.oneof == oneof)
        yield f"At most one of these fields is set: {names}."


def _linked(name: str, known: Collection[str]) -> str:
    """A type, with a link to its section if it has one."""
    *words, last = name.split()
    if last not in known:
        return code(name)
    return " ".join([*map(code, words), f"[{code(last)}](#{last.lower()})"])
