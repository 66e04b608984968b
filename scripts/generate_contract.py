"""Write docs/contract.md from the comments in protos/tinkerpool/v1: every RPC, message, field and value.

The buf of this environment reads the files.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
    ServiceDescriptorProto,
)

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "contract.md"
PACKAGE = "tinkerpool.v1"
FOLDER = "tinkerpool/v1"
ORDER = (
    *("sessions", "adapters", "training", "operations", "history", "checkpoints", "sampling", "imports"),
    *("pool", "probation", "limits", "admin", "types"),
)
"""The files as the page has them: in the order in which a client meets them, then what administrators need."""
HEAD = """# The contract

Every service, call, message and value of `tinkerpool.v1`, with what the `.proto` files say about them: what is durable
when a call returns, whether it is safe to repeat, its errors and limits. [grpc.md](grpc.md) says how a program uses
them, [errors.md](errors.md) has the reasons behind the codes.

This page is generated: `.venv/bin/python -m scripts.generate_contract` writes it from the comments in
`protos/tinkerpool/v1/`.

`no.` is the number of a field in the encoded message. Fields of a oneof exclude each other. An optional field tells
unset from zero; others are zero, false or empty where they are not set. The contract is frozen in
`protos/tinkerpool.binpb`: `tinkerpool.v1` only gets new calls, fields and values. A client ignores those that it has no
name for.
"""
CODES = (
    *("CANCELLED", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS", "PERMISSION_DENIED"),
    *(
        "RESOURCE_EXHAUSTED",
        "FAILED_PRECONDITION",
        "ABORTED",
        "OUT_OF_RANGE",
        "UNIMPLEMENTED",
        "INTERNAL",
        "UNAVAILABLE",
    ),
    *("DATA_LOSS", "UNAUTHENTICATED"),
)
"""Status codes of gRPC that a comment explains as `CODE: when.`."""
_ERROR = re.compile(rf"(?:^|(?<=\. ))(?=(?:{'|'.join(CODES)}): )")
# Numbers of fields in google/protobuf/descriptor.proto, of which the paths of comments consist.
_MESSAGES, _ENUMS, _SERVICES = 4, 5, 6
_METHODS = _FIELDS = _VALUES = 2


@dataclass(frozen=True, slots=True)
class Source:
    """A .proto file with its comments."""

    file: FileDescriptorProto
    comments: dict[tuple[int, ...], str]
    """By the path of what they are about, see `SourceCodeInfo.Location.path`."""

    def of_method(self, service: int, method: int) -> str:
        """Return the comment on a method, by its number in the file's service of this number."""
        return self.comments[_SERVICES, service, _METHODS, method]

    def of_service(self, service: int) -> str:
        """Return the comment on a service, by its number in the file."""
        return self.comments[_SERVICES, service]


def sources() -> list[Source]:
    """Return the files of the contract in the order of the page. Raises CalledProcessError if buf refuses one."""
    command = [str(Path(sys.executable).parent / "buf"), "build", "--path", f"protos/{FOLDER}", "-o", "-"]
    built = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    files = {Path(file.name).stem: file for file in FileDescriptorSet.FromString(built).file if file.package == PACKAGE}
    assert files.keys() == set(ORDER), f"give each file its place in ORDER: {sorted(files.keys() ^ set(ORDER))}"
    return [
        Source(file, {tuple(each.path): each.leading_comments for each in file.source_code_info.location})
        for file in map(files.__getitem__, ORDER)
    ]


def page() -> str:
    """Return the whole page."""
    files = sources()
    with_services = [source for source in files if source.file.service]
    parts = [HEAD, "\n| service | calls |\n|---|---|\n"]
    for source in with_services:
        for service in source.file.service:
            calls = ", ".join(_link(method.name) for method in service.method)
            parts.append(f"| {_link(service.name)} | {calls} |\n")
    for source in with_services:
        parts += _services(source)
    parts.append("\n## Values that several services share\n")
    for source in files:
        if not source.file.service:
            parts += _types(source, {message.name for message in source.file.message_type})
    return "".join(parts)


def _services(source: Source) -> Iterator[str]:
    """Yield the services of a file, each call with its request and response, and then the file's other types."""
    messages = {message.name for message in source.file.message_type}
    for index, service in enumerate(source.file.service):
        yield f"\n## {service.name}\n\n`protos/{source.file.name}`\n\n"
        yield _text(source.of_service(index))
        for number, method in enumerate(service.method):
            yield _method(service, method, source.of_method(index, number))
            own = [_short(name) for name in (method.input_type, method.output_type) if _short(name) in messages]
            messages.difference_update(own)
            yield from _messages(source, own)
    yield from _types(source, messages)


def _method(service: ServiceDescriptorProto, method: MethodDescriptorProto, comment: str) -> str:
    response = ("stream of " if method.server_streaming else "") + _link(_short(method.output_type))
    path = f"`/{PACKAGE}.{service.name}/{method.name}`"
    return f"\n### {method.name}\n\n{path}: {_link(_short(method.input_type))} → {response}\n\n{_text(comment)}"


def _types(source: Source, messages: Iterable[str]) -> Iterator[str]:
    """Yield these messages of a file, and its enums."""
    yield from _messages(source, messages)
    for index, enum in enumerate(source.file.enum_type):
        yield _enum(source, index, enum)


def _messages(source: Source, names: Iterable[str]) -> Iterator[str]:
    for index, message in enumerate(source.file.message_type):
        if message.name in set(names):
            yield _message(source, index, message)


def _message(source: Source, index: int, message: DescriptorProto) -> str:
    rows = [
        (field.name, field.number, _type(message, field), source.comments[_MESSAGES, index, _FIELDS, number])
        for number, field in enumerate(message.field)
    ]
    table = "".join(f"| `{name}` | {no} | {type_} | {_cell(comment)} |\n" for name, no, type_, comment in rows)
    head = "| field | no. | type | meaning |\n|---|---|---|---|\n" if rows else "No fields.\n"
    return f"\n#### {message.name}\n\n{_text(source.comments[_MESSAGES, index])}\n{head}{table}"


def _enum(source: Source, index: int, enum: EnumDescriptorProto) -> str:
    table = "".join(
        f"| `{value.name}` | {value.number} | {_cell(source.comments[_ENUMS, index, _VALUES, number])} |\n"
        for number, value in enumerate(enum.value)
    )
    head = "| value | no. | meaning |\n|---|---|---|\n"
    return f"\n#### {enum.name}\n\n{_text(source.comments[_ENUMS, index])}\n{head}{table}"


def _type(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    """Return the type of a field as the page shows it."""
    entries = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
    if (entry := entries.get(_short(field.type_name))) is not None:
        key, value = entry.field
        return f"map of {_type(entry, key)} to {_type(entry, value)}"
    if field.type_name.startswith(f".{PACKAGE}."):
        name = _link(_short(field.type_name))
    elif field.type_name:
        name = f"`{field.type_name.removeprefix('.')}`"
    else:
        name = f"`{FieldDescriptorProto.Type.Name(field.type).removeprefix('TYPE_').lower()}`"
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {name}"
    if field.proto3_optional:
        return f"optional {name}"
    if field.HasField("oneof_index"):
        return f"{name}, of oneof `{message.oneof_decl[field.oneof_index].name}`"
    return name


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def _link(name: str) -> str:
    return f"[{name}](#{name.lower()})"


def _text(comment: str) -> str:
    """Return a comment as paragraphs, with a list of the errors that it explains."""
    parts = []
    for paragraph in re.split(r"\n\s*\n", comment.strip()):
        prose, *errors = [piece.strip() for piece in _ERROR.split(" ".join(paragraph.split()))] or [""]
        if prose:
            parts.append(f"{_escaped(prose)}\n")
        if errors:
            parts.append("".join(f"- {_error(each)}\n" for each in errors))
    return "\n".join(parts)


def _error(text: str) -> str:
    code, _, when = text.partition(": ")
    return f"`{code}`: {_escaped(when)}"


def _cell(comment: str) -> str:
    return _escaped(" ".join(comment.split())).replace("|", "\\|")


def _escaped(text: str) -> str:
    """Return text whose characters mean themselves outside code."""
    pieces = text.split("`")
    pieces[::2] = [re.sub(r"([<*])", r"\\\1", piece) for piece in pieces[::2]]
    return "`".join(pieces)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
