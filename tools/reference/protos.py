"""The contracts in protos/, with their comments."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)

from tools.house import ROOT

_PROTOS = ROOT / "protos"
# Fields of the descriptors' own messages, which make up the paths of comments.
_SYNTAX = (FileDescriptorProto.SYNTAX_FIELD_NUMBER,)
_SERVICES = FileDescriptorProto.SERVICE_FIELD_NUMBER
_MESSAGES = FileDescriptorProto.MESSAGE_TYPE_FIELD_NUMBER
_ENUMS = FileDescriptorProto.ENUM_TYPE_FIELD_NUMBER
_PARTS = 2  # the methods of a service, the fields of a message, the values of an enum


@dataclass(frozen=True)
class Part:
    """A method, field or enum value. `types` are the types of a method's request and response, or
    of a field. At most one field of a `oneof` is set."""

    name: str
    number: int
    types: tuple[str, ...]
    comment: str
    oneof: str = ""


@dataclass(frozen=True)
class Definition:
    """A service, message or enum."""

    name: str
    comment: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Contract:
    """A file of protos/. `types` are its messages and enums, in the order of the file."""

    package: str
    comment: str
    services: tuple[Definition, ...]
    types: tuple[Definition, ...]


@cache
def contract(name: str) -> Contract:
    """Reads a file of protos/ by its name without the suffix."""
    with TemporaryDirectory() as folder:
        out = Path(folder, "descriptors")
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{_PROTOS}", f"{name}.proto"]
        command += ["--include_source_info", f"--descriptor_set_out={out}"]
        subprocess.run(command, check=True)
        (file,) = FileDescriptorSet.FromString(out.read_bytes()).file
    places = {tuple(each.path): each for each in file.source_code_info.location}

    def comment(*path: int) -> str:
        found = places.get(path)
        texts = (found.leading_comments, found.trailing_comments) if found else ()
        return " ".join(filter(None, map(str.strip, texts)))

    def definitions(kind: int, found: Any) -> Iterator[tuple[int, Definition]]:
        for index, each in enumerate(found):
            path = (kind, index)
            parts = tuple(
                replace(part, comment=comment(*path, _PARTS, place))
                for place, part in enumerate(_parts(each))
            )
            line = places[path].span[0]
            yield line, Definition(each.name, comment(*path), parts)

    services = definitions(_SERVICES, file.service)
    types = [*definitions(_MESSAGES, file.message_type), *definitions(_ENUMS, file.enum_type)]
    return Contract(
        package=file.package,
        comment=comment(*_SYNTAX),
        services=tuple(each for _, each in services),
        types=tuple(each for _, each in sorted(types, key=lambda found: found[0])),
    )


def _parts(found: Any) -> Iterator[Part]:
    """Yields the parts of a service, message or enum, without comments."""
    if isinstance(found, DescriptorProto):
        for field in found.field:
            is_choice = field.HasField("oneof_index") and not field.proto3_optional
            oneof = found.oneof_decl[field.oneof_index].name if is_choice else ""
            yield Part(field.name, field.number, (_type(found, field),), "", oneof)
    elif isinstance(found, EnumDescriptorProto):
        for value in found.value:
            yield Part(value.name, value.number, (), "")
    else:
        for method in found.method:
            request = "stream " * method.client_streaming + _short(method.input_type)
            response = "stream " * method.server_streaming + _short(method.output_type)
            yield Part(method.name, 0, (request, response), "")


def _type(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    name = _short(field.type_name) or FieldDescriptorProto.Type.Name(field.type)
    name = name.removeprefix("TYPE_").lower() if name.startswith("TYPE_") else name
    for entry in message.nested_type:
        if entry.options.map_entry and entry.name == name:
            key, value = (_type(entry, each) for each in entry.field)
            return f"map<{key}, {value}>"
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {name}"
    if field.proto3_optional:
        return f"optional {name}"
    return name


def _short(type_name: str) -> str:
    return type_name.rpartition(".")[2]
