"""Protobuf messages and services made at run time from tables: fields by number and type, and no generated code.

Generated code is good for the versions of protobuf that made it, and two copies of one file cannot be in one pool. So
each table has a pool of its own, and tests hold the tables to the published files.

A kind is a scalar's name, a message of the table (dotted where one lies in another), an enum of it, or a message of a
dependency with a leading dot. `*` is repeated, `|` is in the message's oneof, `map:KIND` is by text. A method whose
messages have a `*` streams them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

Message = Any  # classes of which are made at run time
Fields = Mapping[str, tuple[int, str]]
Methods = Mapping[str, tuple[str, str]]  # request and response

_SCALARS = {  # by descriptor.proto
    "double": 1, "float": 2, "int64": 3, "uint64": 4, "int32": 5, "bool": 8, "string": 9, "bytes": 12, "uint32": 13,
}  # fmt: skip
_MESSAGE, _ENUM, _OPTIONAL, _REPEATED = 11, 14, 1, 3
MAX_FIELDS = 8192  # of a message, with those inside it: a field of two bytes becomes an object of a hundred
_NUMBER_BYTES = 10  # of a number among packed ones, at most
_PACKED = "packed"  # numbers, in place of a message's name


class ProtoFile:
    """One file of messages, with a pool of its own."""

    def __init__(
        self,
        name: str,
        package: str,
        messages: Mapping[str, Fields],
        *,
        oneofs: Mapping[str, str] | None = None,
        enums: Mapping[str, Sequence[str]] | None = None,
        services: Mapping[str, Methods] | None = None,
        dependencies: Sequence[Any] = (),
    ) -> None:
        """`oneofs`: by message; `enums`: values in their order, from 0; `dependencies`: descriptors of files."""
        self._package = package
        self._enums = enums or {}
        self._made: dict[str, Message] = {}  # unfinished descriptors of messages
        needed = [one.name for one in dependencies]
        self.descriptor = descriptor_pb2.FileDescriptorProto(
            name=name, package=package, syntax="proto3", dependency=needed
        )
        for message, fields in messages.items():
            made = self._add_message(message)
            if oneofs and message in oneofs:
                made.oneof_decl.add(name=oneofs[message])
            for field, (number, kind) in fields.items():
                self._add_field(made, message, field, number, kind)
        for enum, values in self._enums.items():
            outer, _, plain = enum.rpartition(".")
            added = self._made[outer].enum_type.add(name=plain)
            for value_number, value in enumerate(values):
                added.value.add(name=value, number=value_number)
        for service, methods in (services or {}).items():
            self._add_service(service, methods)
        self._inner = _inner_kinds(messages)
        self._pool = descriptor_pool.DescriptorPool()
        for one in dependencies:
            self._pool.AddSerializedFile(one.serialized_pb)
        self._pool.AddSerializedFile(self.descriptor.SerializeToString())

    def __getitem__(self, message: str) -> Any:
        """The class of a message."""
        return message_factory.GetMessageClass(self._pool.FindMessageTypeByName(f"{self._package}.{message}"))

    def has_few_fields(self, message: str, data: bytes) -> bool:
        """Whether `data` can be read as this message without becoming many times as large. Anything that is no message
        at all is left to who reads it."""
        try:
            return self._count(message, memoryview(data), 0) <= MAX_FIELDS
        except (IndexError, ValueError):
            return True

    def _count(self, message: str, data: memoryview, count: int) -> int:
        inner, at = self._inner.get(message, {}), 0
        while at < len(data) and count <= MAX_FIELDS:
            tag, at = _varint(data, at)
            count += 1
            match tag & 7:
                case 0:  # a varint
                    _, at = _varint(data, at)
                case 1:
                    at += 8
                case 2:  # with a length: a text, a message or packed numbers
                    length, at = _varint(data, at)
                    kind = inner.get(tag >> 3)
                    if kind == _PACKED:
                        count += length // _NUMBER_BYTES
                    elif kind is not None:
                        count = self._count(kind, data[at : at + length], count)
                    at += length
                case 5:
                    at += 4
                case _:
                    raise ValueError("a group, of which there are none")
        return count

    @property
    def symbols(self) -> list[str]:
        """Full names of what is declared here."""
        services = [(one.name, [method.name for method in one.method]) for one in self.descriptor.service]
        names = [*self._made, *self._enums, *(name for name, _ in services)]
        names += [f"{name}.{method}" for name, methods in services for method in methods]
        return [f"{self._package}.{name}" for name in names]

    @property
    def services(self) -> list[str]:
        return [f"{self._package}.{one.name}" for one in self.descriptor.service]

    def _add_message(self, name: str) -> Message:
        outer, _, plain = name.rpartition(".")
        made = self._made[outer].nested_type.add(name=plain) if outer else self.descriptor.message_type.add(name=plain)
        self._made[name] = made
        return made

    def _add_field(self, message: Message, path: str, name: str, number: int, kind: str) -> None:
        """A map is what protobuf makes of it: a repeated pair."""
        if kind.startswith("map:"):
            pair = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
            pair.options.map_entry = True
            self._add_field(pair, "", "key", 1, "string")
            self._add_field(pair, "", "value", 2, kind.removeprefix("map:"))
            kind = f"*.{self._package}.{path}.{pair.name}"
        plain = kind.lstrip("*|")
        field = message.field.add(name=name, number=number, label=_REPEATED if kind.startswith("*") else _OPTIONAL)
        field.type = _SCALARS.get(plain) or (_ENUM if plain in self._enums else _MESSAGE)
        if plain not in _SCALARS:
            field.type_name = self._full(plain)
        if kind.startswith("|"):
            field.oneof_index = 0

    def _add_service(self, name: str, methods: Methods) -> None:
        service = self.descriptor.service.add(name=name)
        for method, (request, response) in methods.items():
            service.method.add(
                name=method,
                input_type=self._full(request.lstrip("*")),
                output_type=self._full(response.lstrip("*")),
                client_streaming=request.startswith("*"),
                server_streaming=response.startswith("*"),
            )

    def _full(self, name: str) -> str:
        return name if name.startswith(".") else f".{self._package}.{name}"


def _inner_kinds(messages: Mapping[str, Fields]) -> dict[str, dict[int, str]]:
    """Fields by number that hold messages, or may hold many numbers, of each message and each pair of a map."""
    found: dict[str, dict[int, str]] = {}
    for message, fields in messages.items():
        own = found.setdefault(message, {})
        for number, kind in fields.values():
            plain = kind.lstrip("*|")
            if kind.startswith("map:"):
                pair = kind
                found[pair] = {2: value} if (value := kind.removeprefix("map:")) in messages else {}
                own[number] = pair
            elif plain in messages:
                own[number] = plain
            elif kind.startswith("*") and plain not in ("string", "bytes"):
                own[number] = _PACKED
    return found


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """The number at a place, and the place after it."""
    number = shift = 0
    while True:
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7
        if shift > 63:
            raise ValueError("a number without an end")
